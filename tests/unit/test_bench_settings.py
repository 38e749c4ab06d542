"""What makes a run another one, and what a resumed run must not mix."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_cases import make_run
from costs import linear_costs
from entmtp import __version__
from entmtp.bank import Bank, BankSource, Calibration, EntryScore
from entmtp.bench.banks import TaskBank, bank_digest, found_costs
from entmtp.bench.contestants import Contestants, Heads
from entmtp.bench.document import settings_digest, settings_of
from entmtp.bench.methods import METHODS, Method, parse_methods
from entmtp.bench.peer_setting import PeerSetting
from entmtp.bench.running import BenchParams
from entmtp.bench.systems import policy_of
from entmtp.bench.tasks import Task
from entmtp.bench.work import open_work
from entmtp.calibrate.summary import pack_trace
from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine
from entmtp.kernels import library
from entmtp.loading.loader import load_target
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler, HysteresisScheduler
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from fakes import ByteTokenizer, PerfectDrafter, tiny_target
from published import Sizes, TargetArrays, hydra_mlp
from tiny_model import make_model_folder
from traces import random_trace

TASK = Task("chat", (PromptRecord("1", "chat", ("hello",)),), ())
GREEDY = SamplingParams(max_new_tokens=4, seed=0)


def contestants(engine: Engine, heads: Heads, notices: list[str] | None = None) -> Contestants:
    """Of a target that no other program reads."""
    peers = PeerSetting(Path("nowhere"), ByteTokenizer(), 1, 256, Path("nowhere"), is_cpu=True)
    notice = ([] if notices is None else notices).append
    return Contestants(engine, heads, peers, None, notice)


def tiny_engine(drafter: Drafter) -> Engine:
    """Of a random model."""
    return Engine(tiny_target(), drafter, FixedScheduler.plain(), ByteTokenizer())


def settings(
    engine: Engine,
    heads: Heads,
    methods: tuple[Method, ...],
    sampling: SamplingParams = GREEDY,
) -> dict[str, Any]:
    """Of a run of one task."""
    params = BenchParams(sampling)
    return settings_of(contestants(engine, heads), [TASK], methods, params, None)


def test_other_heads_of_the_same_name_are_another_run(tmp_path: Path) -> None:
    """The name alone once counted, so that rows of two sets of heads were mixed."""
    model = make_model_folder(tmp_path / "model")
    engine = Engine(load_target(model), EmptyDrafter(), FixedScheduler.plain(), ByteTokenizer())
    embedding = engine.target.embedding().double().numpy()
    arrays = TargetArrays(embedding, embedding)
    found = []
    for seed in (0, 1):
        file = hydra_mlp(tmp_path / "heads", Sizes(), arrays, seed=seed).file
        heads = Heads("m", model, medusa="nowhere.pt", hydra=str(file))
        found.append(settings(engine, heads, parse_methods("hydra,medusa")))
    assert found[0]["heads"] == found[1]["heads"]
    assert settings_digest(found[0]) != settings_digest(found[1])
    assert found[0]["heads_digests"]["medusa"] is None
    assert settings(engine, heads, parse_methods("lookup"))["heads_digests"] == {}


def test_versions_of_what_takes_part_count() -> None:
    """Those of other programs where they are asked for."""
    engine, heads = tiny_engine(EmptyDrafter()), Heads("m", Path("m"))
    own = settings(engine, heads, parse_methods("plain"))["versions"]
    assert own.keys() == {"entmtp", "torch"}
    assert own["entmtp"] == __version__
    more = settings(engine, heads, parse_methods("hf,llamacpp:Q8_0,vllm"))["versions"]
    assert more.keys() - own.keys() == {"transformers", "llama-cpp-python", "vllm"}
    assert more["transformers"] is not None


def test_the_native_library_counts_where_it_computes() -> None:
    """Of a torch target only the noise of sampling comes from it."""
    engine, heads = tiny_engine(EmptyDrafter()), Heads("m", Path("m"))
    plain = parse_methods("plain")
    assert settings(engine, heads, plain)["core"] is None
    sampled = settings(engine, heads, plain, replace(GREEDY, temperature=0.5))
    assert sampled["core"] == library.library_digest()
    if library.load_library() is not None:
        (file,) = Path(library.__file__).parent.glob("*entmtp.[sd]*")
        assert sampled["core"] == hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def make_bank(rates: dict[str, float]) -> Bank:
    """Two chains, and policies that are as fast as told."""
    params = {"plain": {}, "fixed": {"entry": "long"}}
    params["chain-ema"] = {"slope": 1.0, "offset": 1.0, "max_length": 3}
    policies = {n: {"params": params[n], "check_tokens_per_s": rate} for n, rate in rates.items()}
    source = BankSource("m", "d", "perfect", "d", "torch-cpu", "float32", "cpu", 1)
    packed = pack_trace(random_trace(5, num_texts=8))
    calibration = Calibration(source, linear_costs(), 10.0, packed, {}, {}, policies)
    entries = {"short": Topology.chain(1), "long": Topology.chain(3)}
    scores = {"short": EntryScore(tokens_per_s=2.0), "long": EntryScore(tokens_per_s=1.0)}
    return Bank.of(entries, scores, calibration)


def test_trees_of_a_bank_count_and_costs_do_not() -> None:
    """Costs are those of the process; they are reported beside those of the bank."""
    bank = make_bank({"plain": 1.0})
    assert bank.calibration is not None
    costs = bank.calibration.costs.scaled((1,), (2.0,), 3.0)
    probed = Bank.of(bank.entries, bank.scores, replace(bank.calibration, costs=costs))
    refitted = Bank.of({"short": Topology.chain(2)}, {}, bank.calibration)
    digests = [bank_digest(bank, adapted) for adapted in (bank, probed, refitted)]
    assert digests[0] == digests[1] != digests[2]
    found = found_costs(bank, probed)
    assert found is not None
    assert (found["rows"], found["context"]) == ([1, 2, 4, 8, 16], 100)
    assert found["as_calibrated"] == {
        "check_ms": [12.5, 13.5, 15.5, 19.5, 27.5],
        "draft_ms": [0.5] * 3,
    }
    assert found["check_ms"] == [25.0, 27.0, 31.0, 39.0, 55.0]
    assert found["draft_ms"] == [1.5] * 3
    assert found_costs(Bank.shipped(), Bank.shipped()) is None


@pytest.mark.parametrize(
    ("method", "here", "kept"),
    [
        ("auto", "chain-ema", "plain"),
        ("auto", "chain-ema", "fixed:short"),
        ("fixed", "fixed:long", "fixed:short"),
        ("auto", "chain-ema", "chain-ema"),
        ("auto", "chain-ema", None),
    ],
)
def test_a_resumed_run_stays_with_what_its_methods_came_down_to(
    method: str, here: str, kept: str | None
) -> None:
    """Costs differ by process, and so would the choice of ``auto``: rows of two were once mixed."""
    bank, notices = TaskBank(make_bank({"plain": 1, "fixed": 2, "chain-ema": 3})), list[str]()
    heads = Heads("m", Path("m"), banks={"": bank})
    its = contestants(tiny_engine(PerfectDrafter([])), heads, notices)
    its.keep(TASK, {} if kept is None else {method: kept})
    scheduler = its.scheduler(METHODS[method], TASK)
    assert policy_of(scheduler) == (kept or here)
    assert its.scheduler(METHODS[method], TASK) is scheduler
    if kept in (None, here):
        assert notices == []
    else:
        (notice,) = notices
        assert f"{method} on chat stays {kept}" in notice
        assert f"would be {here} (--fresh starts over)" in notice


def test_rows_tell_what_their_methods_came_down_to(tmp_path: Path) -> None:
    """By task; other programs do not tell."""
    with open_work(tmp_path, "it", {}) as work:
        work.add("chat", [make_run(0, 1.0, policy="plain"), make_run(0, 1.0, method="hf")])
        work.add("chat", [make_run(1, 1.0, method="auto", policy="dynamic")])
        work.add("code", [make_run(0, 1.0, method="auto", policy="ladder")])
    with open_work(tmp_path, "it", {}) as work:
        assert work.policies("chat") == {"plain": "plain", "auto": "dynamic"}
        assert work.policies("code") == {"auto": "ladder"}
        assert work.policies("math") == {}


def test_policies_in_a_word() -> None:
    """A tree by its name, plain decoding as such."""
    assert policy_of(FixedScheduler.plain()) == "plain"
    assert policy_of(FixedScheduler("tree8", Topology.chain(2))) == "fixed:tree8"
    assert policy_of(HysteresisScheduler(Bank.shipped())) == "hysteresis"
