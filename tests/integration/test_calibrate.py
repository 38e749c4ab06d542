"""Calibration of a tiny model: a bank that is found again, fitted again, or refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from costs import linear_costs
from entmtp.bank import Bank
from entmtp.calibrate import adapt
from entmtp.calibrate.adapt import adapt_bank, bank_source, check_bank, is_bank_of, refit_bank
from entmtp.calibrate.build import CalibrateParams, CalibrationRun, Calibrator
from entmtp.calibrate.collect import TraceSettings
from entmtp.calibrate.compare import compare_banks
from entmtp.calibrate.fit import fit_entries
from entmtp.calibrate.recalibrate import recalibrate_by_decoding, recalibrate_by_replay
from entmtp.calibrate.session import encode_records, trace_prompts
from entmtp.calibrate.timing import TimingParams, filler_tokens, time_steps
from entmtp.engine import Engine
from entmtp.errors import BankError, InputError
from entmtp.params import SamplingParams, TypicalParams
from entmtp.scheduler import FixedScheduler
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from exactness import make_drafter
from fakes import ByteTokenizer, tiny_target

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


@pytest.mark.parametrize("stage", ["trace", "grow", "time", "measure"])
def test_a_run_that_was_cut_off_goes_on(stage: str, tmp_path: Path) -> None:
    """What was finished is not done again, and the bank is the one of a run in one go."""
    params = CalibrateParams(
        max_nodes=4, timing=QUICK, measured_prompts=2, measured_tokens=8, num_measured=2
    )
    whole = calibrated(tmp_path, params).bank
    kept = {file.name: file.read_bytes() for file in (tmp_path / "work").iterdir()}
    cut = tmp_path / "cut"
    cut.mkdir()

    def stop(now: str, done: int, total: int) -> None:
        if now == stage and done >= total // 2:
            raise _StopError

    with pytest.raises(_StopError):
        calibrated(cut, params, stop)
    for name, content in kept.items():  # times are never twice the same
        if name.startswith("costs") or stage == "measure":
            (cut / "work" / name).write_bytes(content)
    again = calibrated(cut, params).bank
    assert again.entries == whole.entries
    assert again.calibration == whole.calibration


def test_prompts_of_one_name_in_two_tasks_are_measured_each(tmp_path: Path) -> None:
    """Names are unique in a task only; texts were once mixed up by them."""
    records = [PromptRecord(f"{i // 2}", "ab"[i % 2], (f"prompt {i}",)) for i in range(8)]
    params = replace(FIXED, measure="best", measured_prompts=4, measured_tokens=8, num_measured=2)
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
    prompts = encode_records(engine, RECORDS)
    decoded = recalibrate_by_decoding(engine, prompts, TREES, SAMPLING)
    assert recalibrate_by_replay(trace, TREES) == decoded
    sampling = replace(SAMPLING, temperature=0.7)
    lossy = recalibrate_by_decoding(engine, prompts, TREES, sampling, TypicalParams())
    assert all(count.num_steps > 0 for count in lossy)


def test_typical_acceptance_scores_the_frontier(tmp_path: Path) -> None:
    """Trees are scored by decoding, and the bank says so."""
    run = calibrated(tmp_path, replace(FIXED, typical=TypicalParams()))
    assert run.bank.calibration is not None
    assert run.bank.calibration.settings["verification"] == "typical"


@pytest.mark.parametrize("kind", ["medusa", "hydra", "mtp", "lookup"])
def test_costs_are_measured_at_every_point(kind: str) -> None:
    """Sizes, contexts and batches that were asked for."""
    engine = engine_of(kind)
    costs = time_steps(engine, TREES, filler_tokens(engine), QUICK)
    assert costs.rows == (1, 2, 3, 4)
    assert costs.contexts == (32, 64)
    assert costs.batches == (1, 2)
    assert costs.num_rounds == 2
    assert all(costs.step_ms(tree, 40) > costs.forward(1, 40) / 10 for tree in TREES)
    assert not engine.has_work


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
    assert adapted.calibration.costs != bank.calibration.costs
    assert check_bank(bank, engine).startswith("fits: made for")


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
    monkeypatch.setattr(adapt, "refit_bank", lambda *_: pytest.fail("fitted twice"))
    assert adapt_bank(bank, engine, cache).entries == adapted.entries


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
