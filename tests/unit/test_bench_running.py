"""The measurement with scripted systems: order, peers, conversations, interruption, likelihood."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bench_cases import ScriptedSystem, make_run
from costs import linear_costs
from entmtp.bank import Bank, BankSource, Calibration, EntryScore
from entmtp.bench.contestants import best_entry
from entmtp.bench.likelihood import Likelihood
from entmtp.bench.methods import METHODS, default_methods, parse_methods
from entmtp.bench.running import BenchParams, Measurement, measure_task, order_of
from entmtp.bench.runs import Run, Turn
from entmtp.bench.tasks import Task, encode_tasks
from entmtp.bench.work import WorkFile, open_work
from entmtp.calibrate.summary import pack_trace
from entmtp.calibrate.trace import MISS
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine
from entmtp.errors import InputError
from entmtp.params import SamplingParams
from entmtp.scheduler import POLICIES, FixedScheduler
from entmtp.target.base import Segment
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from fakes import ByteTokenizer, tiny_target
from traces import random_trace

RECORDS = [PromptRecord(str(i), "chat", (f"hello {i}", "and then?")) for i in range(3)]
PARAMS = BenchParams(SamplingParams(max_new_tokens=9, seed=0), repeats=2, peer_limit=1)


@pytest.fixture
def engine() -> Engine:
    """Plain decoding of a tiny model."""
    return Engine(tiny_target(), EmptyDrafter(), FixedScheduler.plain(), ByteTokenizer())


def make_task(engine: Engine, *, all_turns: bool = False) -> Task:
    """Three conversations of two turns."""
    return encode_tasks(engine, {"chat": RECORDS}, all_turns=all_turns)[0]


def measure(
    engine: Engine, task: Task, work: WorkFile, systems: dict[str, ScriptedSystem]
) -> list[Run]:
    """Two repeats."""
    return measure_task(Measurement(engine, PARAMS, work, lambda done, total: None), task, systems)


@pytest.mark.parametrize("size", range(2, 16))
def test_the_order_favours_no_method(size: int) -> None:
    """Of even numbers half once never came first; each follows each equally often too."""
    names = [f"m{i}" for i in range(size)]
    orders = [order_of(names, turn) for turn in range(2 * size)]
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    for name in names:
        assert sum(order.index(name) for order in orders) == size * (size - 1)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert pairs == {(a, b): 2 for a in names for b in names if a != b}


def test_the_first_method_follows_another_as_all_do(engine: Engine, tmp_path: Path) -> None:
    """Likelihoods are read between prompts; the last in line then writes a text that is left out.

    The first once came straight after the reading, which left the machine in another state.
    """
    names, log = ("plain", "hydra", "lookup"), list[tuple[str, int]]()
    systems = {name: ScriptedSystem(name=name, log=log) for name in names}
    with open_work(tmp_path, "digest", {}) as work:
        measure(engine, make_task(engine), work, systems)
    expected = [(name, 8) for name in names]
    for turn in (0, 1, 2, 1, 2, 3):  # prompt and repeat
        order = order_of(names, turn)
        expected += [(order[-1], 8), *((name, 9) for name in order)]
    assert log == expected


def test_peers_decode_the_first_prompts_alone(engine: Engine, tmp_path: Path) -> None:
    """All others decode everything."""
    systems = {name: ScriptedSystem() for name in ("plain", "hydra", "hf")}
    with open_work(tmp_path, "digest", {}) as work:
        runs = measure(engine, make_task(engine), work, systems)
    assert [(r.repeat, r.prompt, r.method) for r in runs[:5]] == [
        (0, 0, "plain"),
        (0, 0, "hydra"),
        (0, 0, "hf"),
        (0, 1, "plain"),
        (0, 1, "hydra"),
    ]
    counts = {name: system.sizes.count(9) for name, system in systems.items()}
    assert counts == {"plain": 6, "hydra": 6, "hf": 2}


def test_conversations_go_on_from_the_method_own_answers(engine: Engine, tmp_path: Path) -> None:
    """Two turns a prompt; without ``all_turns`` the first alone."""
    with open_work(tmp_path, "digest", {}) as work:
        runs = measure(engine, make_task(engine, all_turns=True), work, {"plain": ScriptedSystem()})
    assert {len(run.turns) for run in runs} == {2}
    assert make_task(engine).turns(0) == ("hello 0",)


def test_an_interrupted_run_goes_on_without_loss(engine: Engine, tmp_path: Path) -> None:
    """What was finished is not decoded again, and the rows are those of a run in one piece."""
    task = make_task(engine)
    with open_work(tmp_path, "whole", {}) as work:
        whole = measure(engine, task, work, {"plain": ScriptedSystem()})
    with open_work(tmp_path, "it", {}) as work, pytest.raises(KeyboardInterrupt):
        measure(engine, task, work, {"plain": ScriptedSystem(stops_at=9)})
    system = ScriptedSystem()
    with open_work(tmp_path, "it", {}) as work:
        assert (work.num_done, work.num_processes) == (3, 2)
        found = measure(engine, task, work, {"plain": system})
        work.remove()
    assert system.sizes.count(9) == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == [".whole.lock", "whole.jsonl"]
    assert [run.tokens for run in found] == [run.tokens for run in whole]
    with open_work(tmp_path, "it", {}) as work:
        assert work.num_done == 0


def test_a_line_that_was_cut_off_never_was(tmp_path: Path) -> None:
    """Everything in front of it is kept, and what follows is whole again."""
    with open_work(tmp_path, "it", {}) as work:
        work.add("chat", [make_run(0, 1.0)])
        work.add("chat", [make_run(1, 1.0)])
    file = tmp_path / "it.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    with open_work(tmp_path, "it", {}) as work:
        assert work.get("chat", 0, 0) == (make_run(0, 1.0),)
        assert work.get("chat", 1, 0) is None
        work.add("chat", [make_run(1, 2.0)])
    with open_work(tmp_path, "it", {}) as work:
        assert (work.num_done, work.num_processes) == (2, 3)
    with open_work(tmp_path, "it", {}, is_fresh=True) as work:
        assert work.num_done == 0


def test_a_work_file_is_for_one_process(tmp_path: Path) -> None:
    """A second one is refused, and so are files that hold something else."""
    with (
        open_work(tmp_path, "it", {}),
        pytest.raises(InputError, match="another process"),
        open_work(tmp_path, "it", {}),
    ):
        pass
    (tmp_path / "bad.jsonl").write_text('{"task": "chat"}\n')
    with pytest.raises(InputError, match="damaged"), open_work(tmp_path, "bad", {}):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"), open_work(tmp_path / "file", "x", {}):
        pass
    with pytest.raises(PermissionError), open_work(tmp_path, "it", {}):
        raise PermissionError("of something else")


def test_likelihood_is_that_of_the_whole_text() -> None:
    """The sum over chunks equals one forward of everything, and each text is read once."""
    target = tiny_target()
    prompt, text = (5, 6, 7), tuple((11 * i) % 250 for i in range(150))
    turn = Turn(text, "", 1, 0.1, 0.1, 149)
    likelihood = Likelihood(target)
    found = likelihood.scored(prompt, turn)
    tokens = torch.tensor([*prompt, *text])
    segment = Segment(target.new_cache(256), tokens[:-1], torch.arange(len(tokens) - 1).numpy())
    log_probs = torch.log_softmax(target.forward([segment]).logits[0].double(), dim=-1)
    nll = [-float(log_probs[2 + i, token]) for i, token in enumerate(text)]
    assert found.nll == pytest.approx(sum(nll), 1e-6)
    assert likelihood.scored(prompt, turn) == found


def test_methods_are_named_once_and_plain_decoding_is_always_there() -> None:
    """Names lead to policies that exist."""
    assert [m.name for m in parse_methods("dynamic, hf")] == ["plain", "dynamic", "hf"]
    for wrong, message in (("medusa,tree", "method is 'tree'"), ("hf,hf", "occurs twice")):
        with pytest.raises(InputError, match=message):
            parse_methods(wrong)
    policies = {m.policy for m in METHODS.values()} - {"published", "best", "copies"}
    assert policies <= set(POLICIES)
    assert not any(m.needs_bank or m.peer for m in default_methods(has_bank=False))
    assert "dynamic" in {m.name for m in default_methods(has_bank=True)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"peer_limit": 0}, "peer_limit is 0"),
        ({"sampling": SamplingParams()}, "seed is None"),
    ],
)
def test_what_cannot_be_measured_is_refused(values: dict[str, object], message: str) -> None:
    """The error names the value."""
    with pytest.raises(InputError, match=message):
        BenchParams(**{"sampling": SamplingParams(seed=0), **values})  # type: ignore[arg-type]


def test_the_best_single_tree_is_that_of_the_kind_of_text() -> None:
    """One bank for several tasks gives each its own; kinds that it has not seen get the overall."""
    trace = random_trace(5, num_texts=8)
    kinds = tuple(("code", "chat")[text % 2] for text in range(8))
    is_code = np.repeat([kind == "code" for kind in kinds], np.diff(trace.offsets))
    ranks = np.where(is_code[:, None], np.zeros_like(trace.ranks), np.uint8(MISS))
    trace = replace(trace, tasks=kinds, ranks=ranks)
    source = BankSource("m", "d", "hydra", "d", "torch-cpu", "float32", "cpu", 1)
    costs = linear_costs(row_ms=1.0)
    calibration = Calibration(source, costs, 10.0, pack_trace(trace), {}, {}, {})
    scores = {"none": EntryScore(tokens_per_s=2.0), "chain3": EntryScore(tokens_per_s=1.0)}
    bank = Bank.of({"chain3": Topology.chain(3)}, scores, calibration)
    found = {}
    for kind in ("code", "chat", "poetry"):
        record = PromptRecord("1", kind, ("hello",))
        found[kind] = best_entry(bank, Task(kind, (record,), ()))
    assert found == {"code": "chain3", "chat": "none", "poetry": "none"}
