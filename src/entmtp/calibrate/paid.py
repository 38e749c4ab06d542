"""Signals that cost a pass of the heads before the tree is chosen; for replay alone.

The engine does not have them: what they find does not pay for the pass (lab log, "paid signals").
They are kept so that the claim can be tried again, by ``benchmarks/policies.py``, on other heads.
"""

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.trace import Trace
from entmtp.errors import InputError

__all__ = ["chain_passes", "paid_signal"]

_EXPECTED, _VALUE = "expected_length", "path_value@"


def paid_signal(trace: Trace, name: str) -> npt.NDArray[np.float64]:
    """``(T,)`` values at every root; larger where the text is more predictable.

    With the top-1 probabilities q1 to qK along the drafter's own best chain and p0 of the root,
    ``path_value@d`` is ``p0 * q1 * ... * qd`` (EAGLE-2, arXiv 2406.16858), and ``expected_length``
    the sum of these over all depths.

    Raises:
        InputError: the chain of the trace does not give it.
    """
    depth = chain_passes(trace, name)
    chain = trace.chain[:, :depth].astype(np.float64)
    values = trace.p0.astype(np.float64)[:, None] * np.cumprod(chain, axis=1)
    return values.sum(axis=1) if name == _EXPECTED else values[:, -1]


def chain_passes(trace: Trace, name: str) -> int:
    """Passes of the heads that a signal costs.

    Raises:
        InputError: the chain of the trace does not give it.
    """
    names = {f"{_VALUE}{depth}": depth for depth in range(1, trace.max_depth + 1)}
    found = (names | {_EXPECTED: trace.max_depth}).get(name)
    if found is None:
        raise InputError(
            f"the paid signal is {name!r}; it must be {_EXPECTED} or {_VALUE}1 to "
            f"{_VALUE}{trace.max_depth}"
        )
    return found
