"""The promises on a CUDA device, and what a forward costs there.

python -m pytest tests/gpu -s
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from statistics import median

import numpy as np
import pytest
import torch

import entmtp
from entmtp.check import CheckReport, run_check
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.engine import Engine
from entmtp.loading.assets import MODELS, home, is_complete
from entmtp.params import SamplingParams
from entmtp.target.base import Segment, TargetConfig, TargetOutput
from entmtp.target.cuda_graphs import ROW_COUNTS, Recorder
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import tensor_shapes
from entmtp.topology import Topology
from exactness import (
    RandomScheduler,
    make_drafter,
    outcome,
    plain_engine,
    random_target,
    random_topology,
)
from fakes import ByteTokenizer, tiny_config

DEVICE = "cuda"
GRAPHS: bool | Recorder = True
NAME = "smollm2-135m"
DRAFTERS = ("hydra", "medusa", "lookup", "half-right")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
POISON = 7
TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64)
TABLE_CONTEXT = 256
TABLE_WARM_UPS, TABLE_REPEATS = 5, 30
SHAPES = {
    "two layers of 32": (tiny_config(), torch.float32),
    "SmolLM2-135M": (
        TargetConfig(
            family="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            context_window=8192,
            tie_embeddings=True,
        ),
        torch.bfloat16,
    ),
    "Llama 7B": (
        TargetConfig(
            family="llama",
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            context_window=4096,
        ),
        torch.bfloat16,
    ),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # what a driver or a library has to say is no failure
]


@pytest.fixture(autouse=True)
def timed(request: pytest.FixtureRequest) -> Iterator[None]:
    """The seconds of each test, the work of the device included."""
    start = time.perf_counter()
    yield
    synchronize()
    print(f"  [{request.node.name}: {time.perf_counter() - start:.1f} s]")


# -- helpers ---------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def random_pair(seed: int, dtype: torch.dtype) -> tuple[LlamaTarget, LlamaTarget]:
    """A tiny target that has recorded nothing yet, and its twin without graphs."""
    target = random_target(seed, dtype, DEVICE)
    return target.with_graphs(GRAPHS), target.with_graphs(False)


def shaped_target(
    config: TargetConfig, dtype: torch.dtype, poison: int | None = None
) -> LlamaTarget:
    """Random weights of any size, made on the device; one token's embedding may be NaN."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=DEVICE)
        value = torch.randn(shape, dtype=dtype, device=DEVICE, generator=generator) * 0.02
        if poison is not None and "embed" in name:
            value[poison] = torch.nan
        return value

    tensors = ((name, tensor(name, shape)) for name, shape in tensor_shapes(config).items())
    return LlamaTarget(config, tensors, dtype, DEVICE, GRAPHS)


def wide(num_rows: int) -> Topology:
    """A root with children, two levels of them where there are many."""
    firsts = [(a,) for a in range(min(num_rows - 1, 40))]
    return Topology.from_paths([*firsts, *((0, b) for b in range(num_rows - 1 - len(firsts)))])


def tree_segment(cache: TorchKVCache, tree: Topology, tokens: torch.Tensor) -> Segment:
    """A draft tree; the empty one is plain decoding."""
    mask = tree.ancestor_mask if tree.num_nodes else None
    return Segment(cache, tokens, tree.depths, mask)


def draw(rng: random.Random, size: int) -> list[int]:
    """Token ids that every random target has."""
    return [rng.randrange(12) for _ in range(size)]


def prefilled(target: LlamaTarget, tokens: list[int], capacity: int) -> TorchKVCache:
    """A cache that holds these tokens."""
    cache = target.new_cache(capacity)
    if tokens:
        depths = np.arange(len(tokens))
        target.forward([Segment(cache, torch.tensor(tokens), depths, logits="none")])
        cache.commit(range(len(tokens)))
    return cache


def assert_close(got: TargetOutput, expected: TargetOutput, tolerance: float) -> None:
    """Logits and hidden states agree."""
    for a, b in ((got.logits[0], expected.logits[0]), (got.hidden[0], expected.hidden[0])):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def compare_steps(
    pair: tuple[LlamaTarget, LlamaTarget], trees: list[Topology], rng: random.Random, capacity: int
) -> None:
    """Some steps with their commits on both twins, tokens on the host and on the device."""
    prompt = draw(rng, rng.randrange(20))
    caches = [prefilled(target, prompt, capacity) for target in pair]
    for tree in trees:
        tokens = torch.tensor(draw(rng, tree.num_rows), device=rng.choice(["cpu", DEVICE]))
        outputs = [
            target.forward([tree_segment(cache, tree, tokens)])
            for target, cache in zip(pair, caches, strict=True)
        ]
        assert_close(outputs[0], outputs[1], TOLERANCES[pair[0].dtype])
        path = tree.path_nodes(rng.randrange(tree.num_rows))
        for cache in caches:
            cache.commit(path)


def check_texts(seed: int, dtype: torch.dtype) -> CheckReport:
    """Plain decoding against a random tree at every step: greedy, sampled, alone, in batches."""
    rng = random.Random(seed)
    target, _ = random_pair(seed, dtype)
    prompts = [tuple(draw(rng, rng.randint(1, 20))) for _ in range(4)]
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=(11,))
    greedy = plain_engine(target, tokenizer).generate_batch(
        prompts, SamplingParams(max_new_tokens=24)
    )
    texts = [(*p, *r.token_ids) for p, r in zip(prompts, greedy, strict=True)]
    drafter = make_drafter(DRAFTERS[seed % len(DRAFTERS)], target, texts, seed)
    engine = Engine(target, drafter, RandomScheduler(seed), tokenizer)
    named = [(f"prompt {n}", prompt) for n, prompt in enumerate(prompts)]
    report = run_check(engine, named, max_new_tokens=24, batch_sizes=(1, 3), seed=seed)
    assert target.graph_replays > report.num_tree_steps // 4
    assert 0 < target.graphs_captured <= len(ROW_COUNTS)
    return report


def median_ms(run: Callable[[], object]) -> float:
    """Milliseconds of a call and of its work on the device; warm-up apart."""
    times = []
    for number in range(TABLE_WARM_UPS + TABLE_REPEATS):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        if number >= TABLE_WARM_UPS:
            times.append(1000 * (time.perf_counter() - start))
    return median(times)


def forward_ms(target: LlamaTarget, num_rows: int) -> float:
    """A forward over a tree, or over one token, after ``TABLE_CONTEXT`` tokens."""
    cache = prefilled(target, [1] * TABLE_CONTEXT, TABLE_CONTEXT + 256)
    tokens = torch.ones(num_rows, dtype=torch.int64, device=DEVICE if num_rows > 1 else "cpu")
    segment = tree_segment(cache, wide(num_rows), tokens)
    return median_ms(lambda: target.forward([segment]))


def cost_table(target: LlamaTarget) -> dict[str, list[float]]:
    """Milliseconds a forward by number of rows, kernel by kernel and replayed."""
    eager = target.with_graphs(False)
    return {
        "eager": [round(forward_ms(eager, rows), 4) for rows in TABLE_ROWS],
        "graph": [round(forward_ms(target, rows), 4) for rows in TABLE_ROWS],
    }


def device_name() -> str:
    """The GPU and the versions, for reports."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


# -- exactness -------------------------------------------------------------------------------------


def test_float32_products_are_float32() -> None:
    """TF32 would be coarser than what the other tests allow."""
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_random_trees_write_the_texts_of_plain_decoding(dtype: torch.dtype) -> None:
    """Identical in float64, and in float32 but for rare ties; no difference anywhere is a bug."""
    reports = [check_texts(seed, dtype) for seed in range(4)]
    cases = sum(r.cases for r in reports)
    near_ties = sum(r.near_ties for r in reports)
    largest = max(r.max_logit_difference for r in reports)
    print(f"\n{dtype}: {cases} cases, {near_ties} near-ties, largest difference {largest:.2e}")
    assert [m for r in reports for m in r.mismatches if m.kind == "bug"] == []
    if dtype == torch.float64:
        assert near_ties == 0
    if dtype == torch.float32:
        assert near_ties <= cases // 50


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_replays_equal_plain_kernels(dtype: torch.dtype) -> None:
    """Random trees one after the other, on targets with all options."""
    for seed in range(8):
        rng = random.Random(seed)
        pair = random_pair(seed, dtype)
        for _ in range(3):
            compare_steps(pair, [random_topology(rng) for _ in range(6)], rng, capacity=400)
        assert pair[0].graph_replays == 18


def test_every_number_of_rows_is_right() -> None:
    """Sizes that are filled and padded, and those beyond the largest."""
    rng, pair = random.Random(0), random_pair(1, torch.float32)
    counts = sorted({n for size in ROW_COUNTS for n in (size - 1, size, size + 1)} - {0})
    for count in counts:
        compare_steps(pair, [wide(count), wide(1), wide(count)], rng, capacity=400)
    num_small = sum(count <= ROW_COUNTS[-1] for count in counts)
    assert pair[0].graph_replays == 2 * num_small + len(counts)


def test_switching_trees_records_nothing_new() -> None:
    """A second text through the same trees is replays alone, and the same."""
    target, _ = random_pair(2, torch.float32)
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=())
    engine = Engine(target, make_drafter("hydra", target, (), 0), RandomScheduler(1), tokenizer)
    sampling = SamplingParams(max_new_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    first = engine.generate([1, 2], sampling)
    captured, replays = target.graphs_captured, target.graph_replays
    assert 1 < captured <= len(ROW_COUNTS)
    assert outcome(engine.generate([1, 2], sampling)) == outcome(first)
    assert target.graphs_captured == captured
    assert target.graph_replays == 2 * replays


# -- buffers ---------------------------------------------------------------------------------------


def test_larger_sequences_get_larger_buffers() -> None:
    """Graphs are captured anew on them, and stay right."""
    rng, pair = random.Random(3), random_pair(3, torch.float64)
    captured = []
    for capacity in (10, 250, 300, 700, 20):
        compare_steps(pair, [wide(12), wide(1), wide(9)], rng, capacity)
        captured.append(pair[0].graphs_captured)
    assert captured == [2, 2, 4, 6, 6]
    assert pair[0].graph_replays == 15


def test_outputs_are_not_overwritten() -> None:
    """What a caller keeps of a step outlives the next ones."""
    target, _ = random_pair(4, torch.float32)
    cache = prefilled(target, [1, 2, 3], 64)
    segments = [tree_segment(cache, wide(n), torch.ones(n, dtype=torch.int64)) for n in (4, 12, 4)]
    kept = target.forward(segments[:1])
    copies = kept.logits[0].clone(), kept.hidden[0].clone()
    for segment in segments[1:]:
        target.forward([segment])
    assert torch.equal(kept.logits[0], copies[0])
    assert torch.equal(kept.hidden[0], copies[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_earlier_steps_cannot_spread(dtype: torch.dtype) -> None:
    """NaN in a large tree, recorded or not, and in another sequence, is gone in the next step."""
    target = shaped_target(tiny_config(tie_embeddings=False), dtype, POISON)
    small = torch.tensor([1, 2, 3])
    for num_rows in (40, 150):
        bad = torch.tensor([1] * (num_rows - 1) + [POISON])
        cache = prefilled(target, [1, 2, 3, 4], 400)
        before = target.forward([tree_segment(cache, wide(3), small)])
        target.forward([tree_segment(cache, wide(num_rows), bad)])
        after = target.forward([tree_segment(cache, wide(3), small)])
        target.forward([tree_segment(cache, wide(num_rows), bad)])
        assert bool(torch.isfinite(before.logits[0]).all())
        assert_close(after, before, 1e-3)
        del cache
    assert target.graph_replays == 6


def test_another_stream_may_be_current() -> None:
    """Inputs, replays and copies of the outputs keep the caller's order."""
    pair = random_pair(5, torch.float64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compare_steps(pair, [wide(5), wide(1), wide(30), wide(2)], random.Random(5), 100)
    torch.cuda.current_stream().wait_stream(stream)
    compare_steps(pair, [wide(30), wide(5)], random.Random(6), 100)
    assert pair[0].graph_replays == 6


def test_memory_does_not_grow_with_texts() -> None:
    """Sequences one after the other leave nothing behind."""
    target, _ = random_pair(0, torch.float32)
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=())
    engine = Engine(target, make_drafter("lookup", target, (), 0), RandomScheduler(1), tokenizer)
    sampling = SamplingParams(max_new_tokens=30, seed=1, ignore_eos=True)
    used = []
    for _ in range(6):
        engine.generate([1, 2, 1, 2], sampling)
        synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[1]


# -- the default model -----------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_writes_the_same(dtype: str) -> None:
    """Hydra trees give the texts of plain decoding; what differs is a near-tie."""
    if not is_complete(home() / "models" / NAME, MODELS[NAME]):
        pytest.skip(f"{NAME} has not been pulled")
    engine = entmtp.load(NAME, "hydra", dtype=dtype, device=DEVICE)
    questions = ("Name three rivers in Europe.", "What is 12 times 7?", "Write a haiku on rain.")
    prompts = [(question, tuple(engine.chat_prompt(question))) for question in questions]
    report = run_check(engine, prompts, max_new_tokens=48, batch_sizes=(1, 3))
    print("\n" + json.dumps({"dtype": dtype, **asdict(report)}))
    assert report.bugs == 0
    if dtype == "float32":
        assert report.near_ties <= 1


# -- cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_cost_of_a_forward(name: str) -> None:
    """A table by rows; where launches cost more than products, replays are faster."""
    config, dtype = SHAPES[name]
    num_weights = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
    need = 3 * num_weights * torch.finfo(dtype).bits // 8
    free, _ = torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"{name} needs {need / 2**30:.0f} GiB of device memory")
    target = shaped_target(config, dtype)
    table = cost_table(target)
    print(f"\n{name}, {dtype}, {TABLE_CONTEXT} tokens before, ms a forward, {device_name()}")
    for kind, values in {"rows": TABLE_ROWS, **table}.items():
        print(f"{kind:<8}" + "".join(f"{value:>10}" for value in values))
    print(json.dumps({"shape": name, "dtype": str(dtype), "rows": TABLE_ROWS, **table}))
    assert target.graphs_captured == len(TABLE_ROWS)
    assert target.graph_replays == len(TABLE_ROWS) * (TABLE_WARM_UPS + TABLE_REPEATS)
    if name == "SmolLM2-135M":
        assert sum(table["graph"]) < sum(table["eager"])
