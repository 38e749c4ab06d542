"""Fitted policies in the engine: the steps that replay foretold, and the text of plain decoding."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from costs import linear_costs
from draft_cases import core_drafter
from entmtp.bank import Bank, Calibration
from entmtp.calibrate.adapt import bank_source
from entmtp.calibrate.collect import TraceSettings
from entmtp.calibrate.fit import fit_entries, mean_context
from entmtp.calibrate.fit_policies import fit_policies
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.session import encode_records, trace_prompts, usual_envelope
from entmtp.calibrate.summary import pack_trace, shorten
from entmtp.calibrate.trace import Trace
from entmtp.engine import Engine, GenerationResult, Request
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import (
    POLICIES,
    FixedScheduler,
    HysteresisParams,
    HysteresisScheduler,
    LadderParams,
    LadderScheduler,
    TopologyScheduler,
    make_scheduler,
)
from entmtp.scheduler.values import FEEDBACK
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from exactness import make_drafter
from fakes import ByteTokenizer, tiny_target
from native_cases import make_native, needs_library

VOCAB = 12
TARGET = tiny_target(seed=5, dtype=torch.float64, vocab_size=VOCAB, context_window=512)
CASE = "biased"
KINDS = ("hydra", "medusa", "lookup", pytest.param("native", marks=needs_library))
COSTS = linear_costs(row_ms=0.4)
SAMPLING = SamplingParams(max_new_tokens=40, seed=7, ignore_eos=True)
FITTED = tuple(policy for policy in POLICIES if policy != "auto")
TREES = {
    "chain1": Topology.chain(1),
    "chain2": Topology.chain(2),
    "bushy": Topology.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (0, 1)]),
}


class FewBytes(ByteTokenizer):
    """Every byte is one of a few tokens."""

    def encode(self, text: str) -> list[int]:
        return [byte % VOCAB for byte in text.encode()]


RECORDS = [PromptRecord(f"p{i}", "ab"[i % 2], (f"prompt {i} of {i * i}",)) for i in range(8)]


@lru_cache
def engine_of(kind: str) -> Engine:
    """An engine on a tiny target."""
    if kind == "native":
        target, drafter = make_native(CASE), core_drafter("hydra", CASE)
        return Engine(target, drafter, FixedScheduler.plain(), FewBytes(31, ()))
    return Engine(
        TARGET, make_drafter(kind, TARGET, (), 4), FixedScheduler.plain(), FewBytes(VOCAB, ())
    )


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A drafter."""
    return str(request.param)


@pytest.fixture(scope="module", params=[0.0, 1.0])
def case(
    request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, SamplingParams, Trace, Bank]:
    """An engine, how it samples, what it wrote, and a bank with all policies."""
    engine, sampling = engine_of(kind), replace(SAMPLING, temperature=request.param)
    settings = TraceSettings(sampling, envelope=usual_envelope(engine.drafter))
    folder: Path = tmp_path_factory.mktemp("traces")
    trace = trace_prompts(engine, "tiny", RECORDS, settings, lambda *_: None, folder=folder)
    short = shorten(trace)
    entries = {**fit_entries(short, COSTS, 8)[0], **TREES}
    context = mean_context(short.halves()[0])
    policies = fit_policies(short, entries, COSTS, context)
    source = bank_source(engine, "tiny")
    calibration = Calibration(source, COSTS, context, pack_trace(short), {}, {}, policies)
    return engine, sampling, trace, Bank.of(entries, {}, calibration)


def decoded(
    engine: Engine, sampling: SamplingParams, scheduler: TopologyScheduler
) -> list[GenerationResult]:
    """The prompts of the trace, each alone, as they were traced."""
    prompts = encode_records(engine, RECORDS)
    return [
        engine.run(
            [
                Request(
                    prompt.tokens,
                    replace(sampling, seed=derive_seed(sampling.seed or 0, number)),
                    scheduler,
                )
            ]
        )[0]
        for number, prompt in enumerate(prompts)
    ]


def check(
    case: tuple[Engine, SamplingParams, Trace, Bank], scheduler: TopologyScheduler
) -> set[str]:
    """The same decision and outcome at every step, and the traced text; gives the decisions."""
    engine, sampling, trace, _ = case
    results = decoded(engine, sampling, scheduler)
    replayed = replay_policy(trace, scheduler)
    for number, (result, steps) in enumerate(zip(results, replayed.steps, strict=True)):
        span = slice(int(trace.offsets[number]), int(trace.offsets[number + 1]))
        assert list(result.token_ids) == trace.tokens[span].tolist()
        found = [(step.topology, step.num_accepted) for step in result.stats.steps]
        assert found[:-1] == [(step.name, step.accepted) for step in steps][:-1]
        assert found[-1][0] == steps[-1].name
        if engine.drafter.name != "lookup":  # which leaves out what it does not find
            trees = [(step.num_nodes, step.depth) for step in result.stats.steps]
            assert trees == [(step.tree.num_nodes, step.tree.max_depth) for step in steps]
    return {name for names in replayed.plans for name in names}


@pytest.mark.parametrize("policy", FITTED)
def test_replay_is_decoding_and_decoding_is_plain(
    policy: str, case: tuple[Engine, SamplingParams, Trace, Bank]
) -> None:
    """Under every policy that the bank has; prompt lookup cannot grow trees."""
    engine, _, _, bank = case
    assert bank.calibration is not None
    if policy != "plain" and policy not in bank.calibration.policies:
        assert not hasattr(engine.drafter, "grow")
        return
    check(case, make_scheduler(policy, engine.drafter, bank))


@pytest.mark.parametrize("policy", ["fixed", "throughput", "dynamic", "chain-threshold"])
def test_trees_are_cut_at_the_context_window_as_replay_foretells(
    policy: str, tmp_path: Path
) -> None:
    """Texts end there before they reach their limit of tokens."""
    target = tiny_target(seed=5, dtype=torch.float64, vocab_size=VOCAB, context_window=48)
    drafter = make_drafter("hydra", target, (), 4)
    engine = Engine(target, drafter, FixedScheduler.plain(), FewBytes(VOCAB, ()))
    settings = TraceSettings(SAMPLING, envelope=usual_envelope(drafter))
    trace = trace_prompts(engine, "tiny", RECORDS, settings, lambda *_: None, folder=tmp_path)
    assert max(int(size) for size in np.diff(trace.offsets)) < SAMPLING.max_new_tokens
    short = shorten(trace)
    entries = {**fit_entries(short, COSTS, 8)[0], **TREES}
    context = mean_context(short.halves()[0])
    policies = fit_policies(short, entries, COSTS, context)
    calibration = Calibration(
        bank_source(engine, "tiny"), COSTS, context, pack_trace(short), {}, {}, policies
    )
    bank = Bank.of(entries, {}, calibration)
    check((engine, SAMPLING, trace, bank), make_scheduler(policy, drafter, bank))


@pytest.mark.parametrize("signal", FEEDBACK)
def test_signals_of_acceptance_are_those_of_replay(
    signal: str, case: tuple[Engine, SamplingParams, Trace, Bank]
) -> None:
    """Also where a step is plain, and where lookup has nothing to propose."""
    bank = case[3]
    bounds = (0.45, 0.7) if signal == "hit_ema" else (0.3, 0.8)
    ladder = LadderScheduler(bank, LadderParams(("chain1", "bushy", "chain2"), bounds, signal))
    bands = HysteresisParams(
        ("none", "bushy", "chain2"), (-2.0, -1.0), (-2.2, -1.1), signal="entropy_ema"
    )
    used = check(case, ladder) | check(case, HysteresisScheduler(bank, bands))
    assert len(used) > 1


def test_a_batch_decodes_what_each_does_alone(
    case: tuple[Engine, SamplingParams, Trace, Bank],
) -> None:
    """Trees may differ, since rows are dearer; the texts do not."""
    engine, sampling, trace, bank = case
    scheduler = make_scheduler("throughput", engine.drafter, bank)
    requests = [
        Request(prompt.tokens, replace(sampling, seed=derive_seed(7, number)), scheduler)
        for number, prompt in enumerate(encode_records(engine, RECORDS))
    ]
    for number, result in enumerate(engine.run(requests)):
        span = slice(int(trace.offsets[number]), int(trace.offsets[number + 1]))
        assert list(result.token_ids) == trace.tokens[span].tolist()
