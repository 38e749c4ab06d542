"""The table of costs: what is read between its points, and what is refused."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from costs import linear_costs
from entmtp.costs import CostTable
from entmtp.errors import BankError
from entmtp.topology import Topology

CHAIN = Topology.from_paths([[0], [0, 0]])
WIDE = Topology.from_paths([[0], [1], [0, 0], [1, 0]])


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("context", [20.0, 150.0, 900.0])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_linear_table_is_read_exactly(rows: int, context: float, batch: int) -> None:
    """At its points, between them and beyond them."""
    expected = 10 + batch * (rows + context / 100)
    assert linear_costs().forward(rows, context, batch) == pytest.approx(expected)
    assert linear_costs().rest(rows, batch) == pytest.approx(0.5 * batch)


def slow_read(x: float, points: Sequence[float], values: Sequence[float]) -> float:
    """Piecewise linear through the points, and on along the first or the last piece."""
    if len(points) == 1:
        return values[0]
    at = int(np.searchsorted(points, x, side="right")) - 1
    at = min(max(at, 0), len(points) - 2)
    share = (x - points[at]) / (points[at + 1] - points[at])
    return values[at] + share * (values[at + 1] - values[at])


@pytest.mark.parametrize("seed", range(8))
def test_a_table_is_read_to_the_bit_as_reading_is_written_out(seed: int) -> None:
    """All lines first, then along the contexts, then along the batches; tables of any size."""
    rng = random.Random(seed)
    axes = [[1, 2, 4, 7, 16][: rng.randint(1, 5)] for _ in range(2)]
    rows, batches, contexts = *axes, [40, 100, 1000][: rng.randint(1, 3)]
    lines = [[[rng.uniform(0.1, 9) for _ in rows] for _ in contexts] for _ in batches]
    table = replace(
        linear_costs(),
        rows=tuple(rows),
        batches=tuple(batches),
        contexts=tuple(contexts),
        forward_ms=tuple(tuple(tuple(line) for line in lines) for lines in lines),
        rest_ms=tuple(tuple(line[0]) for line in lines),
    )
    for _ in range(50):
        x, context, batch = rng.randint(1, 30), rng.uniform(0, 2000), rng.randint(1, 20)
        by_batch = [
            slow_read(context, contexts, [slow_read(x, rows, line) for line in own])
            for own in lines
        ]
        assert table.forward(x, context, batch) == max(slow_read(batch, batches, by_batch), 0.0)
        by_batch = [slow_read(x, rows, own[0]) for own in lines]
        assert table.rest(x, batch) == max(slow_read(batch, batches, by_batch), 0.0)


def test_a_draft_costs_its_depths_and_their_rows() -> None:
    """Depth 2 of the wide tree has two parents."""
    costs = linear_costs()
    assert costs.draft(Topology(())) == 0
    assert costs.draft(CHAIN) == pytest.approx(1.0)
    assert costs.draft(WIDE) == pytest.approx(1.0 + 0.1)
    assert costs.draft(WIDE, batch=4) == pytest.approx(1.0 + 0.1 * (3 + 7))


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Forward, rest and draft."""
    costs = linear_costs()
    parts = costs.forward(5, 150) + costs.rest(5) + costs.draft(WIDE)
    assert costs.step_ms(WIDE, 150) == pytest.approx(parts)


def test_scaling_is_by_size() -> None:
    """Factors are read linearly between the sizes and constant beyond them."""
    scaled = linear_costs().scaled((2, 8), (2.0, 4.0), 3.0)
    ratios = [scaled.forward(r, 100) / linear_costs().forward(r, 100) for r in (1, 2, 4, 8, 16)]
    assert ratios == pytest.approx([2, 2, 2 + 2 / 3, 4, 4])
    assert scaled.draft(CHAIN) == pytest.approx(3.0)


def test_round_trip() -> None:
    """Through JSON."""
    costs = linear_costs()
    assert CostTable.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", (1, 4, 2, 8, 16), "must be increasing"),
        ("rows", (2, 3, 4, 8, 16), "must begin with 1"),
        ("rows", (1, 2, 4), "must be"),
        ("draft_ms", (0.5,), "of one length"),
        ("draft_ms", (0.5, float("nan"), 0.5), "must be finite"),
        ("rest_ms", ((-1.0,) * 5,) * 2, "at least 0"),
        ("forward_ms", (((0.0,) * 5,) * 2,) * 2, "above 0"),
    ],
)
def test_what_cannot_be_read_is_refused(field: str, value: object, message: str) -> None:
    """The error names the rule."""
    with pytest.raises(BankError, match=message):
        replace(linear_costs(), **{field: value})


@pytest.mark.parametrize("missing", ["rows", "draft_ms", "spread"])
def test_a_document_that_lacks_a_field(missing: str) -> None:
    """It is no table."""
    document = linear_costs().as_dict()
    del document[missing]
    with pytest.raises(BankError, match="not a table of costs"):
        CostTable.from_dict(document)
