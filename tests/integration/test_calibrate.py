"""Calibration of a tiny model: a bank that is found again, fitted again, or refused."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from costs import linear_costs
from entmtp.bank import Bank
from entmtp.calibrate import adapt, build, measure
from entmtp.calibrate.adapt import adapt_bank, bank_source, check_bank, is_bank_of, refit_bank
from entmtp.calibrate.build import (
    CalibrateParams,
    CalibrationRun,
    Calibrator,
    spread_over_tasks,
)
from entmtp.calibrate.collect import TraceSettings
from entmtp.calibrate.compare import compare_banks
from entmtp.calibrate.fit import fit_entries
from entmtp.calibrate.measure import measure_entries
from entmtp.calibrate.pace import Pace
from entmtp.calibrate.places import filler_tokens
from entmtp.calibrate.recalibrate import recalibrate_by_decoding, recalibrate_by_replay
from entmtp.calibrate.replay import Counts
from entmtp.calibrate.session import encode_records, trace_prompts
from entmtp.calibrate.summary import unpack_trace
from entmtp.calibrate.timing import Probe, TimingParams, probe_costs, time_steps
from entmtp.costs import CostTable
from entmtp.engine import Engine
from entmtp.errors import BankError, InputError, TraceError
from entmtp.params import SamplingParams, TypicalParams
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Segment, Target
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from exactness import SpyTarget, make_drafter
from fakes import ByteTokenizer, tiny_target
from native_cases import make_native, make_reference, needs_library

TARGET = tiny_target(seed=5, dtype=torch.float64, vocab_size=256, context_window=512)
RECORDS = [PromptRecord(f"p{i}", "ab"[i % 2], (f"prompt {i} of {i * i}",)) for i in range(8)]
SAMPLING = SamplingParams(max_new_tokens=24, seed=0)
TREES = [Topology.from_paths(p) for p in ([[0]], [[0], [1]], [[0], [0, 0]], [[0], [1], [0, 1]])]
QUICK = TimingParams(contexts=(32, 64), batches=(1, 2), min_rounds=2, max_rounds=2)


def engine_of(kind: str = "hydra", seed: int = 3) -> Engine:
    """An engine on the tiny target."""
    drafter = make_drafter(kind, TARGET, (), seed)
    return Engine(TARGET, drafter, FixedScheduler.plain(), ByteTokenizer())


def calibrated(
    folder: Path,
    params: CalibrateParams,
    progress: Callable[[str, int, int], None] | None = None,
    records: Sequence[PromptRecord] = tuple(RECORDS),
) -> CalibrationRun:
    """A run in a folder."""
    (folder / "work").mkdir(exist_ok=True)
    calibrator = Calibrator(
        engine_of(),
        "tiny",
        TraceSettings(SAMPLING),
        params,
        (folder / "traces", folder / "work"),
        progress or (lambda *_: None),
    )
    return calibrator.run(records, {"argv": []})


FIXED = CalibrateParams(max_nodes=8, costs=linear_costs(), measure="none")


def test_a_bank_is_written_read_and_compared(tmp_path: Path) -> None:
    """Everything survives the file; a bank is as good as itself on its own texts."""
    bank = calibrated(tmp_path, FIXED).bank
    bank.write(tmp_path / "it.json")
    assert Bank.read(tmp_path / "it.json") == bank
    assert bank.best in bank.entries
    table = compare_banks({"a": bank, "b": bank})
    assert {cell["share"] for row in table.values() for cell in row.values()} == {1.0}


@pytest.mark.parametrize("cut", ["calibration", "paths", "sha256"])
def test_an_edited_bank_is_refused(cut: str, tmp_path: Path) -> None:
    """One changed character is enough; so is a cut."""
    text = calibrated(tmp_path, FIXED).bank.to_json()
    file = tmp_path / "it.json"
    place = text.index(cut) + len(cut) + 30
    file.write_text(text[:place] + ("8" if text[place] != "8" else "9") + text[place + 1 :])
    with pytest.raises(BankError, match=r"it\.json: "):
        Bank.read(file)
    file.write_text(text[:-40])
    with pytest.raises(BankError, match="cannot be read as a bank"):
        Bank.read(file)


class _StopError(Exception):
    """Stands for a power cut."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Clocks that always show the same, and how often steps and texts were timed."""
    counts = {"timed": 0, "decoded": 0}
    decode = measure._decode

    def timed(*args: Any) -> CostTable:
        args[-1](1, 2)  # progress
        counts["timed"] += 1
        return linear_costs()

    def decoded(*args: Any) -> tuple[Sequence[int], float]:
        counts["decoded"] += args[-1] > 8  # warm-up apart
        ids, _ = decode(*args)
        return ids, 10.0 * len(ids) + args[4].num_nodes

    monkeypatch.setattr(build, "time_steps", timed)
    monkeypatch.setattr(measure, "_decode", decoded)
    monkeypatch.setattr(Pace, "now", lambda self: 1.0)
    return counts


@pytest.mark.parametrize("stage", ["trace", "grow", "time", "measure", "fit"])
def test_a_run_that_was_cut_off_goes_on(
    stage: str, tmp_path: Path, counted: dict[str, int]
) -> None:
    """What was finished is not done again, and the bank is the one of a run in one go."""
    params = CalibrateParams(
        max_nodes=4,
        timing=QUICK,
        measured_prompts=4,
        measured_texts=8,
        measured_tokens=9,
        num_measured=2,
    )
    whole = calibrated(tmp_path, params).bank
    alone = dict(counted)
    assert alone == {"timed": 1, "decoded": 8}
    cut = tmp_path / "cut"
    cut.mkdir()

    def stop(now: str, done: int, total: int) -> None:
        if now == stage and done >= total // 2:
            raise _StopError

    with pytest.raises(_StopError):
        calibrated(cut, params, stop)
    assert calibrated(cut, params).bank == whole
    done_twice = {name: counted[name] - 2 * alone[name] for name in alone}
    assert done_twice == {"timed": 0, "decoded": 0}


def test_measured_texts_are_of_all_tasks(tmp_path: Path) -> None:
    """Also where tasks do not lie side by side; as many as asked, where there are so many."""
    records = [PromptRecord(f"p{i}", "aaab"[i // 4], (f"prompt {i}",)) for i in range(16)]
    engine = engine_of()
    trace = trace_prompts(
        engine, "tiny", records, TraceSettings(SAMPLING), lambda *_: None, folder=tmp_path
    )
    check = trace.half_texts()[1]
    tasks = [trace.tasks[text] for text in spread_over_tasks(trace, check, 4)]
    assert sorted(tasks) == ["a", "a", "b", "b"]
    assert sorted(spread_over_tasks(trace, check, 99)) == sorted(check)
    assert len(spread_over_tasks(trace, check, 7)) == 7


def test_a_text_that_is_not_the_one_traced_is_refused(tmp_path: Path) -> None:
    """Its times would say nothing of the traced text."""
    engine = engine_of()
    trace = trace_prompts(
        engine, "tiny", RECORDS, TraceSettings(SAMPLING), lambda *_: None, folder=tmp_path
    )
    tokens = trace.tokens.copy()
    tokens[int(trace.offsets[1]) + 2] += 1
    with pytest.raises(TraceError, match="prompt 'p1' gave another text"):
        measure_entries(
            engine,
            replace(trace, tokens=tokens),
            dict(enumerate(encode_records(engine, RECORDS))),
            {"it": TREES[0]},
            linear_costs(),
            max_new_tokens=8,
            work=tmp_path / "work.json",
        )


def test_prompts_of_one_name_in_two_tasks_are_measured_each(tmp_path: Path) -> None:
    """Names are unique in a task only; texts were once mixed up by them."""
    records = [PromptRecord(f"{i // 2}", "ab"[i % 2], (f"prompt {i}",)) for i in range(8)]
    params = replace(
        FIXED,
        measure="best",
        measured_prompts=4,
        measured_texts=8,
        measured_tokens=8,
        num_measured=2,
    )
    run = calibrated(tmp_path, params, records=records)
    assert run.measured
    for one in run.measured.values():
        assert len({text.measured_ms for text in one.texts}) == len(one.texts) == 4


def test_recalibration_by_replay_is_recalibration_by_decoding(tmp_path: Path) -> None:
    """Under exact verification; typical acceptance keeps at least as much here."""
    engine = engine_of()
    trace = trace_prompts(
        engine, "tiny", RECORDS, TraceSettings(SAMPLING), lambda *_: None, folder=tmp_path
    )
    prompts = dict(enumerate(encode_records(engine, RECORDS)))
    decoded = recalibrate_by_decoding(engine, prompts, TREES, SAMPLING)
    assert recalibrate_by_replay(trace, TREES) == decoded
    half = trace.halves()[1]
    numbers = trace.half_texts()[1]
    decoded = recalibrate_by_decoding(engine, {n: prompts[n] for n in numbers}, TREES, SAMPLING)
    assert recalibrate_by_replay(half, TREES) == decoded


def test_recalibration_goes_on_behind_the_last_tree(tmp_path: Path) -> None:
    """Found trees are not decoded again."""
    engine, work = engine_of(), tmp_path / "work.json"
    prompts = dict(enumerate(encode_records(engine, RECORDS)))
    sampling = replace(SAMPLING, temperature=0.7)
    typical = TypicalParams()
    whole = recalibrate_by_decoding(engine, prompts, TREES, sampling, typical, work=work)
    assert json.loads(work.read_text()) == [[c.num_tokens, c.num_steps] for c in whole]
    work.write_text("[[70, 7]]")
    again = recalibrate_by_decoding(engine, prompts, TREES, sampling, typical, work=work)
    assert again == [Counts(70, 7), *whole[1:]]
    work.write_text("[[70")
    with pytest.raises(TraceError, match="damaged"):
        recalibrate_by_decoding(engine, prompts, TREES, sampling, typical, work=work)


def test_typical_acceptance_scores_the_frontier(tmp_path: Path) -> None:
    """Trees are scored by decoding, and the bank says so."""
    run = calibrated(tmp_path, replace(FIXED, typical=TypicalParams()))
    assert run.bank.calibration is not None
    assert run.bank.calibration.settings["verification"] == "typical"
    engine = engine_of()
    prompts = encode_records(engine, RECORDS)
    fitting = {text: prompts[text] for text in run.trace.half_texts()[0]}
    tree = run.bank.entries[run.bank.best]
    (count,) = recalibrate_by_decoding(engine, fitting, [tree], SAMPLING, TypicalParams())
    score = run.bank.scores[run.bank.best]
    assert score.accept_own == count.mean_acceptance_length
    adapted = adapt_bank(run.bank, engine)
    now = adapted.scores[run.bank.best]
    assert now.accept_own == score.accept_own
    assert now.step_ms is not None
    assert now.tokens_per_s == pytest.approx(1000 * count.mean_acceptance_length / now.step_ms)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "mtp", "lookup"])
def test_costs_are_measured_at_every_point(kind: str) -> None:
    """Sizes, contexts and batches that were asked for."""
    engine = engine_of(kind)
    costs = time_steps(engine, TREES, filler_tokens(engine), QUICK)
    assert costs.rows == (1, 2, 3, 4)
    assert costs.contexts == (32, 64)
    assert costs.batches == (1, 2)
    assert costs.num_rounds == 2
    assert not engine.has_work


@pytest.mark.parametrize("kind", ["hydra", "lookup"])
def test_the_rows_that_are_timed_are_those_of_the_table(kind: str) -> None:
    """Also where the drafter finds nothing: lookup drafts nothing in filler text."""
    engine, rows = engine_of(kind), Counter[int]()
    forward = engine.target.forward

    class Watching(SpyTarget):
        def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> Any:
            if all(segment.mask is not None for segment in segments):
                rows[sum(segment.tokens.numel() for segment in segments)] += 1
            return forward(segments, needs_logits=needs_logits)

    engine.target = Watching(engine.target)
    params = TimingParams(contexts=(32,), batches=(1,), min_rounds=3, max_rounds=3)
    time_steps(engine, TREES, filler_tokens(engine), params)
    visits = 3 * (1 + 3)  # small trees thrice a round, of which one warms up
    assert {size: rows[size] for size in (2, 3, 4)} == {2: visits, 3: 2 * visits, 4: visits}


def test_costs_need_trees_and_a_window() -> None:
    """The error says what is missing."""
    engine = engine_of()
    with pytest.raises(InputError, match="at least one tree"):
        time_steps(engine, [], filler_tokens(engine), QUICK)
    small = tiny_target(seed=5, vocab_size=256, context_window=100)
    cramped = Engine(
        small, make_drafter("hydra", small, (), 3), FixedScheduler.plain(), ByteTokenizer()
    )
    with pytest.raises(InputError, match="window of 100 is too small"):
        time_steps(cramped, TREES, filler_tokens(cramped), QUICK)


def test_a_bank_is_rescaled_on_its_own_machine(tmp_path: Path) -> None:
    """Entries stay; costs are those of now."""
    engine = engine_of()
    bank = calibrated(tmp_path, FIXED).bank
    adapted = adapt_bank(bank, engine)
    assert adapted.entries == bank.entries
    assert adapted.calibration is not None
    assert bank.calibration is not None
    found = adapted.calibration.settings["probe"]
    assert len(found["rows"]) == len(found["factors"]) > 1
    traced = len(unpack_trace(bank.calibration.trace).facts.envelope)
    assert max(found["rows"]) >= 1 + max(n for n in (0, 7, 15) if n <= traced)  # as grown trees
    before, now = bank.calibration.costs, adapted.calibration.costs
    factors = dict(zip(found["rows"], found["factors"], strict=True))
    for size in factors.keys() & set(before.rows):  # between these the table is read linearly
        factor = factors[size]
        assert now.forward(size, 100) == pytest.approx(before.forward(size, 100) * factor)
    again = adapt_bank(bank, engine).calibration
    assert again is not None
    assert again.costs == adapted.calibration.costs  # one probe a process
    assert check_bank(bank, engine).startswith("fits: made for")


def test_costs_are_of_the_temperature_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is asked for, of that of the calibration; on other machines too."""
    engine = engine_of()
    bank = calibrated(tmp_path, FIXED).bank
    asked: list[float] = []

    def probe(*given: Any) -> Probe:
        asked.append(given[-1])
        return probe_costs(*given)

    monkeypatch.setattr(adapt, "probe_costs", probe)
    adapt_bank(bank, engine)
    adapt_bank(bank, engine, temperature=0.7)
    assert asked == [0.0, 0.7]
    monkeypatch.setattr(adapt, "_QUICK", QUICK)
    monkeypatch.setattr(adapt, "cpu_name", lambda: "another processor")
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # timed, timed and kept, found
        adapt_bank(bank, engine, cache, 0.7)
    assert asked == [0.0, 0.7, 0.7, 0.7, 0.7]
    adapt_bank(bank, engine, cache=tmp_path / "other")  # timed a moment ago: no probe
    assert len(asked) == 5


def test_a_bank_of_another_machine_is_fitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the texts that it carries; the result is kept and found again."""
    engine, cache = engine_of(), tmp_path / "cache"
    bank = calibrated(tmp_path, FIXED).bank
    monkeypatch.setattr(adapt, "_QUICK", QUICK)
    monkeypatch.setattr(adapt, "cpu_name", lambda: "another processor")
    assert "device" in check_bank(bank, engine)
    adapted = adapt_bank(bank, engine, cache)
    assert adapted.calibration is not None
    assert adapted.calibration.source.device == "another processor"
    files = list(cache.iterdir())
    assert len(files) == 1
    assert "was fitted to this machine before" in check_bank(bank, engine, cache)
    monkeypatch.setattr(adapt, "refit_bank", lambda *_: pytest.fail("fitted twice"))
    assert adapt_bank(bank, engine, cache).entries == adapted.entries
    monkeypatch.undo()
    monkeypatch.setattr(adapt, "_QUICK", QUICK)
    monkeypatch.setattr(adapt, "cpu_name", lambda: "another processor")
    files[0].write_text("{")  # damaged: made again
    assert adapt_bank(bank, engine, cache).entries.keys() >= {"none"}
    Bank.read(files[0])


def test_timing_that_takes_long_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, after the first counted round; not to a caller that has its own progress."""
    engine, bank = engine_of(), calibrated(tmp_path, FIXED).bank
    monkeypatch.setattr(adapt, "_QUICK", QUICK)
    told: list[tuple[int, int]] = []
    for limit_s, progress, count in (
        (3600.0, None, 0),
        (0.0, None, 1),
        (0.0, lambda *at: told.append(at), 1),
    ):
        monkeypatch.setattr(adapt, "_LONG_S", limit_s)
        refit_bank(bank, engine, progress)
        assert caplog.text.count("timing steps takes about") == count
    assert told[-1] == (2, 2)


@needs_library
def test_the_digest_of_weights_does_not_depend_on_arithmetic() -> None:
    """Nor on the backend; other weights have another."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    targets: list[Target] = [make_native("biased"), *(make_reference("biased", k) for k in kinds)]
    assert len({target.weights_digest for target in targets}) == 1
    assert len({(target.backend, target.precision) for target in targets}) == 4
    assert make_reference("biased", seed=2).weights_digest != targets[0].weights_digest


def test_a_bank_of_another_precision_is_fitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of the same weights, so it is not refused."""
    bank = calibrated(tmp_path, FIXED).bank
    single = tiny_target(seed=5, dtype=torch.float32, vocab_size=256, context_window=512)
    drafter = make_drafter("hydra", TARGET, (), 3)
    other = Engine(single, drafter, FixedScheduler.plain(), ByteTokenizer())
    assert "precision float64, here float32" in check_bank(bank, other)
    monkeypatch.setattr(adapt, "refit_bank", lambda *_: Bank.shipped())
    assert adapt_bank(bank, other) == Bank.shipped()


def test_fitting_again_with_the_same_costs_gives_the_same_entries(tmp_path: Path) -> None:
    """The bank carries all that fitting reads."""
    run = calibrated(tmp_path, FIXED)
    entries, scores = fit_entries(run.trace, linear_costs(), 8)
    assert Bank.of(entries, scores, run.bank.calibration) == run.bank


def test_a_bank_of_other_heads_or_another_model_is_refused(tmp_path: Path) -> None:
    """The error names both, and what differs."""
    bank = calibrated(tmp_path, FIXED).bank
    assert is_bank_of(bank, engine_of())
    for other in (engine_of("medusa"), engine_of("hydra", seed=4)):
        assert not is_bank_of(bank, other)
        with pytest.raises(BankError, match="calibrated for tiny with hydra"):
            adapt_bank(bank, other)
    model = tiny_target(seed=6, dtype=torch.float64, vocab_size=256, context_window=512)
    drafter = make_drafter("hydra", model, (), 3)
    other = Engine(model, drafter, FixedScheduler.plain(), ByteTokenizer())
    with pytest.raises(BankError, match="its model_digest differs"):
        check_bank(bank, other)


def test_bare_banks_fit_everywhere() -> None:
    """They are given back as they are, and cannot be fitted."""
    engine = engine_of()
    assert adapt_bank(Bank.shipped(), engine) == Bank.shipped()
    assert is_bank_of(Bank.shipped(), engine)
    assert check_bank(Bank.shipped(), engine).startswith("a bare list of trees")
    with pytest.raises(BankError, match="not calibrated"):
        refit_bank(Bank.shipped(), engine)


def test_a_task_of_one_prompt_is_refused(tmp_path: Path) -> None:
    """One half would be empty."""
    calibrator = Calibrator(
        engine_of(),
        "tiny",
        TraceSettings(SAMPLING),
        FIXED,
        (tmp_path, tmp_path),
        lambda *_: None,
    )
    with pytest.raises(InputError, match="task 'b' has one prompt"):
        calibrator.run(RECORDS[:3], {})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_nodes", 0), ("measure", "some"), ("num_measured", 1), ("measured_tokens", 1)],
)
def test_settings_out_of_limits(field: str, value: object) -> None:
    """The error names the value."""
    with pytest.raises(InputError, match=f"{field} is {value!r}"):
        CalibrateParams(**{field: value})  # type: ignore[arg-type]


def test_the_source_names_machine_and_model() -> None:
    """What decides whether costs hold here."""
    source = bank_source(engine_of(), "tiny")
    assert source.model == "tiny"
    assert source.drafter == "hydra"
    assert source.threads == torch.get_num_threads()
    assert source.device
