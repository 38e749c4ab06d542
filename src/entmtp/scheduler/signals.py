"""Signals: what is known, for free, when the next topology is chosen.

All come from the raw logits, before temperature and other warps: at temperature 0 the warped
distribution is one-hot and says nothing.
"""

from typing import NamedTuple

__all__ = ["DECAY", "HIT_DECAY", "Ema", "Signal", "SignalTracker"]


class Signal(NamedTuple):
    """One small vector a step.

    Attributes:
        p0: top-1 probability of the target distribution that the root was drawn from.
        entropy: its Shannon entropy in nats.
        p0_ema: bias-corrected exponential moving average of ``p0`` over the steps so far.
        entropy_ema: the same of ``entropy``.
        accepted_ema: the same of the number of accepted draft tokens, over the steps that drafted
            some; 0 before the first.
        num_steps: steps made before this choice.
        hit_ema: the same of whether the drafter's best first token was the target's, over the
            steps in which it had one; 0 before the first.
        num_hits: those steps.
        context: committed tokens.
        batch: sequences that decode in this step.
        last_accepted: draft tokens that the last step kept; -1 where it drafted none.
    """

    p0: float
    entropy: float
    p0_ema: float
    entropy_ema: float
    accepted_ema: float
    num_steps: int
    hit_ema: float = 0.0
    num_hits: int = 0
    context: int = 0
    batch: int = 1
    last_accepted: int = -1


DECAY, HIT_DECAY = 0.8, 0.9
"""Weight of the past in the averages; that of hits is slower."""


class Ema:
    """m_t = b m_{t-1} + (1 - b) x_t, read as m_t / (1 - b^t)."""

    def __init__(self, decay: float) -> None:
        """Start empty; ``decay`` is the weight of the past."""
        self._decay, self._mean, self._weight = decay, 0.0, 0.0

    def push(self, value: float) -> None:
        """Take a value."""
        self._mean = self._decay * self._mean + (1 - self._decay) * value
        self._weight = self._decay * self._weight + (1 - self._decay)

    @property
    def value(self) -> float:
        """The average; 0 before the first value."""
        return self._mean / self._weight if self._weight else 0.0


class SignalTracker:
    """Keeps the signals of one sequence; bounded state."""

    def __init__(self, decay: float = DECAY) -> None:
        """Start before the first token; ``decay`` is the weight of the past in each average."""
        self._p0, self._entropy, self._accepted = Ema(decay), Ema(decay), Ema(decay)
        self._hits = Ema(HIT_DECAY)
        self.last = (0.0, 0.0)
        """Entropy and top-1 probability of the newest distribution."""
        self._num_steps = self._num_hits = 0
        self._last_accepted = -1

    def start(self, entropy: float, p0: float) -> None:
        """Take the distribution that the first token was drawn from."""
        self._observe(entropy, p0)

    def step(
        self, entropy: float, p0: float, num_accepted: int | None, is_hit: bool | None = None
    ) -> None:
        """Take the outcome of a step and the distribution that its bonus token was drawn from.

        Args:
            entropy: of that distribution.
            p0: its top-1 probability.
            num_accepted: draft tokens kept; ``None`` where nothing was drafted.
            is_hit: whether the drafter's best first token was the target's; ``None`` where it had
                none.
        """
        self._last_accepted = -1 if num_accepted is None else num_accepted
        if num_accepted is not None:
            self._accepted.push(num_accepted)
        if is_hit is not None:
            self._hits.push(is_hit)
            self._num_hits += 1
        self._num_steps += 1
        self._observe(entropy, p0)

    def _observe(self, entropy: float, p0: float) -> None:
        self.last = (entropy, p0)
        self._entropy.push(entropy)
        self._p0.push(p0)

    def signal(self, context: int = 0, batch: int = 1) -> Signal:
        """The current vector, for a step of ``batch`` sequences after ``context`` tokens."""
        entropy, p0 = self.last
        return Signal(
            p0=p0,
            entropy=entropy,
            p0_ema=self._p0.value,
            entropy_ema=self._entropy.value,
            accepted_ema=self._accepted.value,
            num_steps=self._num_steps,
            hit_ema=self._hits.value,
            num_hits=self._num_hits,
            context=context,
            batch=batch,
            last_accepted=self._last_accepted,
        )
