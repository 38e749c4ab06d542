"""The promises on the real default model, where it has been pulled."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import entmtp
from entmtp.calibrate.collect import TraceSettings
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import Counts
from entmtp.calibrate.session import encode_records, trace_prompts
from entmtp.check import run_check
from entmtp.engine import Request
from entmtp.kernels.library import load_library
from entmtp.loading.assets import MODELS, home, is_complete
from entmtp.loading.outline import ModelOutline
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.target.weights import read_config
from entmtp.topology import Topology, named_topologies
from entmtp.workload import PromptRecord
from exactness import RandomScheduler
from published import (
    Sizes,
    TargetArrays,
    hydra_mlp,
    hydra_prefix_mlp,
    medusa_v1,
    mtp_deepseek,
    mtp_mimo,
)

NAME = "smollm2-135m"
PROMPT = "Name three rivers in Europe and say where each of them ends."
pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The pulled model."""
    path = home() / "models" / NAME
    if not is_complete(path, MODELS[NAME]):
        pytest.skip(f"{NAME} has not been pulled")
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> entmtp.GenerationResult:
    """What the model writes when nothing is drafted."""
    engine = entmtp.load(NAME, "none", dtype="float32", device="cpu")
    return engine.generate(
        engine.chat_prompt(PROMPT), entmtp.SamplingParams(max_new_tokens=32, seed=0)
    )


@pytest.mark.parametrize("drafter", ["lookup", "hydra++", "hydra", "medusa"])
def test_a_tree_changes_nothing(plain: entmtp.GenerationResult, drafter: str) -> None:
    """Greedy text through sixteen nodes a step is the model's own, token for token."""
    engine = entmtp.load(NAME, drafter, topology="tree16", dtype="float32", device="cpu")
    result = engine.generate(
        engine.chat_prompt(PROMPT), entmtp.SamplingParams(max_new_tokens=32, seed=0)
    )
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert result.stats.num_tokens == 32


RANDOM_HEADS = ("medusa", "hydra", "hydra++", "mtp-deepseek", "mtp-mimo")


@pytest.fixture
def random_heads(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Untrained heads of each kind in the sizes of the model; large, so they go at once."""
    config = read_config(folder)
    sizes = Sizes(
        config.hidden_size,
        config.vocab_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.rope_theta,
        config.rms_norm_eps,
    )
    embedding = ModelOutline(folder).embedding().double().numpy()
    target, file = TargetArrays(embedding, embedding), tmp_path / "module.safetensors"
    kind = request.param
    if kind == "medusa":
        file = medusa_v1(tmp_path / "heads", sizes, num_heads=2).file
    elif kind == "hydra":
        file = hydra_mlp(tmp_path / "heads", sizes, target).file
    elif kind == "hydra++":
        file = hydra_prefix_mlp(tmp_path / "heads", sizes, target).file
    elif kind == "mtp-deepseek":
        save_file(mtp_deepseek(sizes, config.num_layers, target=target)[0], file)
    else:
        save_file(mtp_mimo(sizes, qkv_bias=False)[0], file)
    yield file
    file.unlink()


@pytest.mark.parametrize("random_heads", RANDOM_HEADS, indirect=True)
def test_random_heads_change_nothing(random_heads: Path) -> None:
    """``check`` with random trees at every step, greedy and sampled, alone and in a batch."""
    engine = entmtp.load(NAME, str(random_heads), dtype="float32", device="cpu")
    prompts = [(str(i), engine.chat_prompt(PROMPT + "!" * i)) for i in range(2)]
    report = run_check(engine, prompts, max_new_tokens=8, batch_sizes=(1, 2))
    assert report.cases == 8
    assert report.bugs == 0
    assert report.identical + report.near_ties == report.cases


def test_transformers_writes_the_same(folder: Path, plain: entmtp.GenerationResult) -> None:
    """The first 24 greedy tokens of the reference implementation, from the same weights."""
    from transformers import AutoModelForCausalLM

    engine = entmtp.load(NAME, "none", dtype="float32", device="cpu")
    prompt = torch.tensor([engine.chat_prompt(PROMPT)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
    )
    assert tuple(ids[0, prompt.shape[1] :].tolist()) == plain.token_ids[:24]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_is_what_the_native_core_decodes(
    folder: Path, tmp_path: Path, temperature: float
) -> None:
    """Two trees and a policy over them on a trace of three prompts: the same steps, exactly."""
    if load_library() is None:
        pytest.skip("the native core is missing")
    engine = entmtp.load(NAME, "hydra", backend="native")
    sampling = entmtp.SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    records = [PromptRecord(f"p{i}", "t", (f"{PROMPT} ({i})",)) for i in range(3)]
    trace = trace_prompts(
        engine, NAME, records, TraceSettings(sampling), lambda *_: None, output=tmp_path / "t"
    )
    trees = [Topology.from_paths([(0,), (2,), (0, 1)]), named_topologies()["tree8"]]
    policies: list[entmtp.TopologyScheduler] = [FixedScheduler("it", tree) for tree in trees]
    for policy in [*policies, RandomScheduler(0, trees)]:
        requests = [
            Request(
                prompt.tokens,
                replace(sampling, seed=derive_seed(5, number)),
                policy,
            )
            for number, prompt in enumerate(encode_records(engine, records))
        ]
        decoded = [
            Counts(sum(s.num_accepted + 1 for s in steps[:-1]), len(steps) - 1)
            for steps in (result.stats.steps for result in engine.run(requests))
        ]
        assert list(replay_policy(trace, policy).counts) == decoded
