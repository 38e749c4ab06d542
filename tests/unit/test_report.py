"""The pictures of a calibration."""

from pathlib import Path

import pytest

from costs import linear_costs
from entmtp.bank import Bank, BankSource, Calibration
from entmtp.calibrate.build import CalibrationRun
from entmtp.calibrate.fit import find_candidates, mean_context
from entmtp.calibrate.grow import GrowParams, grow_all
from entmtp.calibrate.measure import Measured, MeasuredText
from entmtp.calibrate.pareto import select_entries
from entmtp.calibrate.summary import pack_trace, shorten
from traces import random_trace

PNG = b"\x89PNG"


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    """Six files, each of them a PNG."""
    pytest.importorskip("matplotlib")
    from entmtp.calibrate.report import write_report

    trace, costs = shorten(random_trace(2, num_texts=24, max_rank=8)), linear_costs(0.3)
    fitting, _ = trace.halves()
    candidates = find_candidates(fitting, grow_all(fitting, GrowParams(max_nodes=24)), costs)
    entries, scores = select_entries(fitting, candidates)
    source = BankSource("m", "0", "hydra", "0", "native", "int8", "cpu", 2)
    calibration = Calibration(
        source, costs, mean_context(fitting), pack_trace(trace), {"max_nodes": 24}, {}, {}
    )
    bank = Bank.of(entries, scores, calibration)
    measured = {bank.best: Measured((MeasuredText(30, 400.0, 410.0),))}
    run = CalibrationRun(bank, trace, tuple(candidates), measured)
    files = write_report(run, tmp_path)
    assert len(files) == 6
    assert all(file.read_bytes().startswith(PNG) for file in files)
