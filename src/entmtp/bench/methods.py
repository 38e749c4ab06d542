"""What can be compared: methods by name, and what each needs. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from entmtp.errors import InputError

__all__ = ["METHODS", "PLAIN", "Method", "default_methods", "parse_methods"]

PLAIN = "plain"

Heads = Literal["none", "medusa", "hydra", "own", "lookup"]
Peer = Literal["hf", "llamacpp", "vllm"]


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: as users give it.
        title: what it is, in a few words.
        heads: who drafts: nobody, the published kinds of heads, the heads of ``--drafter``, or
            prompt lookup.
        policy: of :data:`entmtp.scheduler.POLICIES`; ``published`` is the tree of the published
            systems, ``best`` the best static tree of the task, ``copies`` a chain of copied tokens.
        needs_bank: whether it needs a calibrated bank.
        peer: the other program that decodes; ``None``: this one.
        variant: of the peer: a type of weights, or how it decodes.
    """

    name: str
    title: str
    heads: Heads = "none"
    policy: str = PLAIN
    needs_bank: bool = False
    peer: Peer | None = None
    variant: str = ""


def _own(policy: str, title: str, *, needs_bank: bool = True, name: str = "") -> Method:
    return Method(name or policy, title, "own", policy, needs_bank)


_ALL = (
    Method(PLAIN, "plain decoding, one token a step"),
    Method("medusa", "Medusa heads, tree mc_sim_7b_63", "medusa", "published"),
    Method("hydra", "Hydra heads, tree mc_sim_7b_63", "hydra", "published"),
    _own("best", "EntMTP*: the best static tree of the task", name="hydra-best"),
    _own("fixed", "the bank's tree for every text"),
    _own("ladder", "EntMTP-l: thresholds on the signal pick a tree"),
    _own("hysteresis", "EntMTP-tau: thresholds with a dead band", needs_bank=False),
    _own("throughput", "the tree with the most tokens for its time"),
    _own("dynamic", "trees grown node by node as far as they pay"),
    _own("auto", "what --policy auto takes", needs_bank=False),
    _own("chain-ema", "chains, length by recent acceptance"),
    _own("chain-threshold", "chains, cut where the draft is unsure"),
    Method("lookup", "prompt lookup, a chain of copied tokens", "lookup", "copies"),
    Method("hf", "transformers generate, bfloat16", peer="hf", variant="bfloat16"),
    Method("hf:float32", "transformers generate, float32", peer="hf", variant="float32"),
    Method(
        "hf-lookup",
        "transformers with prompt lookup, bfloat16",
        peer="hf",
        variant="bfloat16+lookup",
    ),
    Method(
        "hf-lookup:float32",
        "transformers with prompt lookup, float32",
        peer="hf",
        variant="float32+lookup",
    ),
    *(
        Method(f"llamacpp:{kind}", f"llama.cpp, {kind}", peer="llamacpp", variant=kind)
        for kind in ("Q4_0", "Q8_0", "BF16")
    ),
    Method("vllm", "vLLM, bfloat16, eager", peer="vllm", variant="bfloat16"),
    Method(
        "vllm-ngram",
        "vLLM with its n-gram speculation, bfloat16, eager",
        peer="vllm",
        variant="bfloat16+ngram",
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
"""Methods by name."""


def parse_methods(text: str) -> tuple[Method, ...]:
    """Methods out of ``plain,hydra,dynamic``; plain decoding, the yardstick, is always there.

    Raises:
        InputError: an unknown name, or one that occurs twice.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise InputError(f"method is {name!r}; it must be one of {', '.join(METHODS)}")
        if names.count(name) > 1:
            raise InputError(f"method {name!r} occurs twice; name each method once")
    return tuple(METHODS[name] for name in dict.fromkeys((PLAIN, *names)))


def default_methods(*, has_bank: bool) -> tuple[Method, ...]:
    """All methods of this program that can be tried with or without a bank."""
    return tuple(m for m in _ALL if m.peer is None and (has_bank or not m.needs_bank))
