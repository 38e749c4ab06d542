"""Signals as numbers that policies compare: the larger, the more predictable is the text."""

from collections.abc import Mapping, Sequence

from entmtp.bank import NONE
from entmtp.errors import InputError
from entmtp.scheduler.signals import Signal

__all__ = [
    "FEEDBACK",
    "KNOWN_STEPS",
    "PRIOR_HIT",
    "PRIOR_STEPS",
    "SIGNALS",
    "Score",
    "check_levels",
    "check_signal",
    "signal_value",
]

SIGNALS = ("entropy", "p0", "entropy_ema", "p0_ema", "accepted_ema", "hit_ema")
"""Names of the free signals, in the order in which they are summed."""

FEEDBACK = ("accepted_ema", "hit_ema")
"""Those that stand still while nothing is drafted."""

PRIOR_HIT, PRIOR_STEPS, KNOWN_STEPS = 0.5, 2.0, 10
"""What ``hit_ema`` is drawn to, the steps that this is worth, and the most that the average is."""


def signal_value(signal: Signal, name: str) -> float:
    """A free signal: minus the entropy, or how often drafts were right.

    ``hit_ema`` is drawn to one half as long as little is known of it.

    Args:
        signal: of the step.
        name: one of :data:`SIGNALS`.
    """
    if name in ("entropy", "entropy_ema"):
        return -float(getattr(signal, name))
    return _hit_value(signal) if name == "hit_ema" else float(getattr(signal, name))


def _hit_value(signal: Signal) -> float:
    known = signal.num_hits if signal.num_hits < KNOWN_STEPS else KNOWN_STEPS
    return (known * signal.hit_ema + PRIOR_STEPS * PRIOR_HIT) / (known + PRIOR_STEPS)


class Score:
    """Weighted sum of signals, in the order of :data:`SIGNALS`; the names are looked up once."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Of signals by name."""
        self._terms: list[tuple[int, float]] = []
        for name in SIGNALS[:-1]:
            if name in weights:
                sign = -1.0 if name in ("entropy", "entropy_ema") else 1.0
                self._terms.append((Signal._fields.index(name), sign * weights[name]))
        self._of_hits = weights.get("hit_ema")

    def __call__(self, signal: Signal) -> float:
        """Sum of weight times :func:`signal_value`."""
        total = 0.0
        for index, weight in self._terms:
            total += weight * signal[index]
        if self._of_hits is not None:
            total += self._of_hits * _hit_value(signal)
        return total


def check_levels(name: str, levels: Sequence[str]) -> None:
    """Refuse a signal for these levels.

    Args:
        name: of the signal.
        levels: bank entries.

    Raises:
        InputError: it is no signal, or would never again leave the level of plain decoding.
    """
    check_signal(name)
    if name in FEEDBACK and NONE in levels and len(levels) > 1:
        raise InputError(
            f"{name} stands still while nothing is drafted, so the level {NONE!r} would never be "
            "left; use another signal, or levels that draft"
        )


def check_signal(name: str) -> None:
    """Refuse what is no signal.

    Raises:
        InputError: names those that exist.
    """
    if name not in SIGNALS:
        raise InputError(f"the signal is {name!r}; it must be one of {', '.join(SIGNALS)}")
