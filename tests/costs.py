"""A table of costs that nobody measured: linear in rows and context."""

from entmtp.costs import CostTable

ROWS, CONTEXTS, BATCHES = (1, 2, 4, 8, 16), (100, 200), (1, 4)


def linear_costs(row_ms: float = 1.0, depth: int = 3) -> CostTable:
    """``10 + rows * row_ms + context / 100`` a sequence; half a millisecond a depth."""
    return CostTable(
        ROWS,
        CONTEXTS,
        BATCHES,
        tuple(
            tuple(tuple(10 + b * (r * row_ms + c / 100) for r in ROWS) for c in CONTEXTS)
            for b in BATCHES
        ),
        tuple(tuple(0.5 * b for _ in ROWS) for b in BATCHES),
        (0.5,) * depth,
        (0.1,) * depth,
    )
