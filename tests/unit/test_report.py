"""The pictures of a calibration."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costs import linear_costs
from entmtp.bank import Bank, BankSource, Calibration
from entmtp.calibrate.build import CalibrationRun
from entmtp.calibrate.fit import find_candidates, mean_context
from entmtp.calibrate.grow import GrowParams, grow_all
from entmtp.calibrate.measure import Measured, MeasuredText
from entmtp.calibrate.pareto import select_entries
from entmtp.calibrate.summary import pack_trace, shorten
from entmtp.calibrate.trace import MISS, Trace
from traces import random_trace

PNG = b"\x89PNG"


def run_of(trace: Trace, **settings: object) -> CalibrationRun:
    """A calibration of a trace that was never decoded, with costs that nobody measured."""
    trace, costs = shorten(trace), linear_costs(0.3)
    fitting, _ = trace.halves()
    candidates = find_candidates(fitting, grow_all(fitting, GrowParams(max_nodes=24)), costs)
    entries, scores = select_entries(fitting, candidates, costs)
    source = BankSource("m", "0", "hydra", "0", "native", "int8", "cpu", 2)
    calibration = Calibration(
        source, costs, mean_context(fitting), pack_trace(trace), settings, {}, {}
    )
    bank = Bank.of(entries, scores, calibration)
    measured = {bank.best: Measured((MeasuredText(30, 400.0, 410.0),))}
    return CalibrationRun(bank, trace, tuple(candidates), measured)


def is_picture(file: Path) -> bool:
    """A PNG that can be read and shows more than one colour."""
    from matplotlib.image import imread

    return file.read_bytes().startswith(PNG) and float(np.ptp(imread(file)[..., :3])) > 0


@pytest.mark.parametrize("depth", [3, 5])
@pytest.mark.parametrize("verification", ["exact", "typical"])
def test_every_picture_is_drawn(tmp_path: Path, depth: int, verification: str) -> None:
    """Six files, each of them a PNG; the published tree is cut where the trace is shallower."""
    pytest.importorskip("matplotlib")
    from entmtp.calibrate.report import write_report

    trace = random_trace(2, num_texts=24, depth=depth, max_rank=12)
    files = write_report(run_of(trace, verification=verification), tmp_path)
    assert [file.name for file in files] == [
        "acceptance_frontier.png",
        "throughput_frontier.png",
        "costs.png",
        "ranks.png",
        "trees.png",
        "entropy.png",
    ]
    assert all(is_picture(file) for file in files)


def test_a_report_needs_no_decoded_entry_and_few_texts(tmp_path: Path) -> None:
    """Without measured entries, and with so few positions that bins have one text."""
    pytest.importorskip("matplotlib")
    from entmtp.calibrate.report import write_report

    run = replace(run_of(random_trace(5, num_texts=4)), measured={})
    assert all(is_picture(file) for file in write_report(run, tmp_path))


def test_the_published_tree_is_in_sight_where_all_candidates_are_smaller() -> None:
    """Once the axis ended at the largest candidate, left of it."""
    pytest.importorskip("matplotlib")
    from entmtp.calibrate.report import _draw_throughput

    run = run_of(random_trace(2, num_texts=24, depth=5, max_rank=12))
    axes = _draw_throughput(run).axes[0]
    star = next(line for line in axes.lines if str(line.get_label()).startswith("mc_sim"))
    assert max(c.topology.num_nodes for c in run.candidates) < star.get_xdata()[0]
    assert star.get_xdata()[0] < axes.get_xlim()[1]


def test_shares_of_ranks_leave_out_positions_beyond_the_text() -> None:
    """A drafter that is always right has rank 0 everywhere, though texts end."""
    from entmtp.calibrate.report import _rank_shares

    trace = random_trace(3)
    right = replace(trace, ranks=np.where(trace.ranks == MISS, MISS, 0).astype(np.uint8))
    for end in trace.offsets[1:]:  # misses only where nothing follows
        start = int(max(o for o in trace.offsets if o < end))
        for depth in range(trace.max_depth):
            right.ranks[start : max(end - 1 - depth, start), depth] = 0
    shares = _rank_shares(right)
    assert shares[:, 0].tolist() == [1.0] * trace.max_depth
    assert not shares[:, 1:].any()


def test_an_interval_of_a_mean_takes_texts_as_the_units() -> None:
    """Repeating every position of a text adds no certainty; one text alone gives none."""
    from entmtp.calibrate.report import _half_interval

    values, texts = np.array([0, 1, 3, 2]), np.array([0, 0, 1, 2])
    once = _half_interval(values, texts)
    assert _half_interval(np.repeat(values, 9), np.repeat(texts, 9)) == pytest.approx(once)
    assert np.isnan(_half_interval(values, np.zeros(4, dtype=np.int64)))
