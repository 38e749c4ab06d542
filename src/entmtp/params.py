"""Parameters that users set: the one place of their defaults and limits. Imports nothing heavy."""

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real

from entmtp.errors import InputError

__all__ = ["MAX_SEED", "SamplingParams", "TypicalParams"]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends; validated when made.

    Attributes:
        max_new_tokens: most tokens to emit, the end-of-text token included.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens that reaches this mass; 1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one; 0 keeps all.
        repetition_penalty: > 1 divides positive and multiplies negative logits of tokens that
            occur in the prompt or in the text so far.
        presence_penalty: subtracted once from tokens in the text so far (prompt not counted).
        frequency_penalty: subtracted per occurrence in the text so far (prompt not counted).
        seed: 0 to 2**63 - 1; ``None`` draws one, which is reported.
        stop: strings that end the text; the text is cut before the first that appears.
        ignore_eos: go on past the end-of-text token.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: names the field, its value and its limits.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is float and not (isinstance(value, Real) and math.isfinite(value)):
                raise InputError(f"{item.name} is {value!r}; it must be a finite number")
            is_number = isinstance(value, Integral) or (item.name == "seed" and value is None)
            if item.type in (int, int | None) and not is_number:
                raise InputError(f"{item.name} is {value!r}; it must be a whole number")
        self._check("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        self._check("temperature", self.temperature >= 0, "0 (greedy) or more")
        self._check("top_k", self.top_k >= 0, "0 (off) or more")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "above 0")
        self._check(
            "seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "between 0 and 2**63 - 1"
        )
        is_list = isinstance(self.stop, tuple | list)
        if not is_list or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError(f"stop is {self.stop!r}; it must be a tuple of non-empty strings")

    def _check(self, name: str, is_valid: bool, limits: str) -> None:
        if not is_valid:
            raise InputError(f"{name} is {getattr(self, name)}; it must be {limits}")

    @property
    def is_greedy(self) -> bool:
        """True where no noise is drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True where a token depends on the tokens before it, beyond the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True)
class TypicalParams:
    """Typical acceptance (Medusa, section 3.3.1). **Lossy**: the output is not the target's own.

    Attributes:
        posterior_threshold: epsilon, an absolute floor.
        posterior_alpha: delta, scales the floor by exp(-entropy).
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            InputError: names the field, its value and its limits.
        """
        if not 0 <= self.posterior_threshold <= 1:
            raise InputError(
                f"posterior_threshold is {self.posterior_threshold}; it must be between 0 and 1"
            )
        if not (self.posterior_alpha >= 0 and math.isfinite(self.posterior_alpha)):
            raise InputError(f"posterior_alpha is {self.posterior_alpha}; it must be 0 or more")
