"""Points at which steps are timed, dealt to several machines and joined again."""

import pytest

from entmtp.calibrate.points import (
    Point,
    StepSamples,
    TimedPoints,
    cost_table,
    join_timed,
    split_points,
)
from entmtp.topology import Topology

PLANS = [Topology(()), *(Topology(tuple((0,) * d for d in range(1, k + 1))) for k in (1, 2, 3))]
POINTS = [Point(64, 1, plan) for plan in PLANS] + [Point(64, 4, plan) for plan in PLANS[:2]]


def timed(points: list[Point], factor: float = 1.0) -> TimedPoints:
    """On a machine that takes ``factor`` as long as it should; a step costs 1 ms a row."""
    samples = {}
    for point in points:
        forward = factor * 1e-3 * point.plan.num_rows * point.batch
        draft = factor * 1e-4 * point.plan.max_depth
        samples[point] = StepSamples([draft] * 3, [forward] * 3, [factor * 1e-5] * 3)
    return TimedPoints(samples, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 99])
def test_points_are_dealt_once_and_the_first_to_all(count: int) -> None:
    """No machine gets nothing but the common point."""
    shares = split_points(POINTS, count)
    assert len(shares) == min(count, len(POINTS) - 1)
    assert {point for share in shares for point in share} == set(POINTS)
    own = [point for share in shares for point in share if point != POINTS[0]]
    assert len(own) == len(POINTS) - 1
    assert all(share[0] == POINTS[0] and len(set(share)) > 1 for share in shares)


def test_machines_at_other_speeds_give_one_table() -> None:
    """Times are scaled by the common point, so the table is that of the first machine."""
    shares = split_points(POINTS, 3)
    parts = [timed(share, factor) for share, factor in zip(shares, (1.0, 1.4, 0.7), strict=True)]
    joined, alone = cost_table(join_timed(parts)), cost_table(timed(POINTS))
    assert joined.rows == alone.rows == (1, 2, 3, 4)
    assert joined.batches == (1, 4)
    for plan in PLANS:
        for batch in (1, 4):
            assert joined.step_ms(plan, 64, batch) == pytest.approx(alone.step_ms(plan, 64, batch))
