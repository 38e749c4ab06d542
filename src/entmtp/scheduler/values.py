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
    "check_levels",
    "check_signal",
    "score",
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
    if name == "hit_ema":
        known = min(signal.num_hits, KNOWN_STEPS)
        return (known * signal.hit_ema + PRIOR_STEPS * PRIOR_HIT) / (known + PRIOR_STEPS)
    return float(getattr(signal, name))


def score(signal: Signal, weights: Mapping[str, float]) -> float:
    """Weighted sum of signals, in the order of :data:`SIGNALS`."""
    total = 0.0
    for name in SIGNALS:
        if name in weights:
            total += weights[name] * signal_value(signal, name)
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
