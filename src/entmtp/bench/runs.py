"""What is kept of one text under one method: tokens, times and steps; and how it is written."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from entmtp.bank import NONE

__all__ = ["Run", "Step", "Turn", "size_class"]


@dataclass(frozen=True)
class Step:
    """One step of decoding.

    Attributes:
        plan: name of the scheduler's choice; of a tree that was grown its :func:`size_class`.
        nodes: draft tokens checked.
        depth: of the tree that was checked.
        accepted: draft tokens kept, before cutting at a stop.
        entropy: nats, of the distribution that the root was drawn from.
        schedule_ms: choosing the plan.
        draft_ms: filling or growing the tree.
        forward_ms: the target's forward.
        rest_ms: verifying, committing, reading the signals.
    """

    plan: str
    nodes: int
    depth: int
    accepted: int
    entropy: float
    schedule_ms: float
    draft_ms: float
    forward_ms: float
    rest_ms: float

    @property
    def shape(self) -> tuple[str, int, int]:
        """What steps have in common whose times can be compared."""
        return self.plan, self.nodes, self.depth

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return self.schedule_ms + self.draft_ms + self.forward_ms + self.rest_ms


def size_class(nodes: int) -> str:
    """Plan of a tree that was grown: ``none``, ``1-2 nodes``, ``3-4 nodes``, ``5-8 nodes`` ...

    A policy that grows trees makes one decision for all of them, and hardly two trees are alike.
    """
    if not nodes:
        return NONE
    most = max(2, 1 << (nodes - 1).bit_length())
    least = 1 if most == 2 else most // 2 + 1
    return f"{least}-{most} nodes"


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        tokens: emitted.
        text: of them.
        num_first: tokens that came with the prompt; all others are decoded.
        prefill_s: seconds to the first token.
        decode_s: seconds from the first token to the last.
        num_steps: target forwards in decode.
        steps: one a forward; empty for programs that do not tell.
        nll: negative log-likelihood of all tokens under the target, nats, at temperature 1.
        policy: what the method came down to, see :func:`entmtp.bench.systems.policy_of`; empty for
            other programs.
    """

    tokens: tuple[int, ...]
    text: str
    num_first: int
    prefill_s: float
    decode_s: float
    num_steps: int
    steps: tuple[Step, ...] = ()
    nll: float = 0.0
    policy: str = ""

    @property
    def num_decoded(self) -> int:
        """Tokens after those that came with the prompt."""
        return len(self.tokens) - self.num_first

    @property
    def accept_lengths(self) -> tuple[int, ...]:
        """Tokens of each step, the bonus token included."""
        return tuple(step.accepted + 1 for step in self.steps)


@dataclass(frozen=True)
class Run:
    """All answers to one prompt under one method, once.

    Attributes:
        prompt: number in its task.
        repeat: from 0.
        method: its name.
        turns: one an answer.
        peak_bytes: most memory of the process, or of the GPU, while it decoded; ``None`` where
            the system does not tell.
    """

    prompt: int
    repeat: int
    method: str
    turns: tuple[Turn, ...]
    peak_bytes: int | None = None

    @property
    def num_decoded(self) -> int:
        """Over all turns."""
        return sum(turn.num_decoded for turn in self.turns)

    @property
    def decode_s(self) -> float:
        """Over all turns."""
        return sum(turn.decode_s for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Over all turns, first tokens included."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def nll(self) -> float:
        """Over all turns."""
        return sum(turn.nll for turn in self.turns)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Of each turn."""
        return tuple(turn.tokens for turn in self.turns)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Of all turns."""
        return tuple(step for turn in self.turns for step in turn.steps)

    @property
    def num_steps(self) -> int:
        """Over all turns."""
        return sum(turn.num_steps for turn in self.turns)

    def as_dict(self) -> dict[str, Any]:
        """JSON form; a step is a list."""
        turns = [
            {**asdict(turn), "steps": [list(asdict(step).values()) for step in turn.steps]}
            for turn in self.turns
        ]
        return {**{name: getattr(self, name) for name in _PLAIN}, "turns": turns}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Run":
        """Read what :meth:`as_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: anything else.
        """
        turns = tuple(_turn(turn) for turn in document["turns"])
        return cls(**{name: document[name] for name in _PLAIN}, turns=turns)


_PLAIN = ("prompt", "repeat", "method", "peak_bytes")


def _turn(document: Mapping[str, Any]) -> Turn:
    steps: Sequence[Sequence[Any]] = document["steps"]
    return Turn(
        **{
            **document,
            "tokens": tuple(document["tokens"]),
            "steps": tuple(Step(*step) for step in steps),
        }
    )
