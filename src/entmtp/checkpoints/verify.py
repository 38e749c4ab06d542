"""Are heads drafted right? Every node of random trees, held against the formulas.

The text is the target's own: a prompt is decoded plainly, its hidden states are read, and at some
positions the drafter fills random trees. Each node's token must be the best, second best, ... by
:class:`entmtp.checkpoints.reference.Reference`, given the tokens above it. The same text tells
how often each head's first choices are right, which shows heads of another model that happen to
have the same sizes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from entmtp.check import TOLERANCES, random_topology
from entmtp.checkpoints.own_names import published_names
from entmtp.checkpoints.reference import Reference, TargetMatrices
from entmtp.drafters.base import Drafter, DraftRequest, DraftTree
from entmtp.drafters.checkpoint import load_heads, read_heads_file
from entmtp.drafters.formats.naming import strip_prefix
from entmtp.errors import InputError
from entmtp.loading.drafters import heads_of_source, make_drafter
from entmtp.loading.heads_source import HeadsSource
from entmtp.target.base import Segment, Target
from entmtp.topology import Topology

__all__ = ["VerifyReport", "WrongNode", "verify_heads"]

Progress = Callable[[int, int], None]

_MAX_DEPTH = 5
_MAX_RANK = 9
_MAX_NODES = 24
_WIDTH = 5


@dataclass(frozen=True)
class WrongNode:
    """A node whose token is not what the formulas give.

    Attributes:
        position: t of the tree.
        path: child ranks from the root.
        token: that was drafted.
        expected: by the formulas.
        gap: by which the scores of the two differ.
    """

    position: int
    path: tuple[int, ...]
    token: int
    expected: int
    gap: float


@dataclass
class VerifyReport:
    """Counts over all nodes.

    Attributes:
        kind: of the drafter.
        nodes: that were compared.
        equal: with the expected token.
        near_ties: another token, whose score is equal to within the dtype's rounding.
        top1: for each depth, how often the first choice was the target's own token.
        top5: the same for the first five choices.
        wrong: the rest of the nodes.
    """

    kind: str
    nodes: int = 0
    equal: int = 0
    near_ties: int = 0
    top1: tuple[float, ...] = ()
    top5: tuple[float, ...] = ()
    wrong: list[WrongNode] = field(default_factory=list)


@dataclass(frozen=True)
class _Text:
    """Tokens x_0 .. x_T and the target's hidden states h_0 .. h_{T-1}."""

    tokens: list[int]
    hidden: Tensor


def verify_heads(  # noqa: PLR0913 - keyword-only beyond the fourth
    source: HeadsSource,
    target: Target,
    model: str,
    prompt: Sequence[int],
    *,
    num_tokens: int = 48,
    num_trees: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare drafts with the formulas.

    Args:
        source: where the heads lie.
        target: that they belong to.
        model: its name, for messages.
        prompt: token ids to start the text from.
        num_tokens: emitted tokens of the text.
        num_trees: positions at which a tree is filled.
        seed: of the trees.
        progress: told the trees done and in all.

    Raises:
        CheckpointError: the heads cannot be used with this target.
        InputError: the prompt is empty, or leaves no room in the context window.
    """
    _check_prompt(prompt, target)
    drafter = make_drafter(heads_of_source(source, target, model), target)
    reference = _reference(source, target, model)
    text = _plain_text(target, list(prompt), num_tokens)
    report = VerifyReport(drafter.name)
    rng = random.Random(seed)
    depth = min(drafter.max_depth or _MAX_DEPTH, _MAX_DEPTH)
    rank = min(drafter.max_width or _MAX_RANK + 1, _MAX_RANK + 1) - 1
    first = len(prompt)
    for number in range(num_trees):
        t = first + number * max(1, (len(text.hidden) - first) // num_trees) - 1
        if t + 1 >= len(text.tokens):
            break
        plan = Topology(())
        while not plan.num_nodes:
            plan = random_topology(rng, depth, rank, _MAX_NODES)
        tree = _draft(drafter, text, t, plan)
        _compare(report, reference, text, t, tree, TOLERANCES[target.dtype])
        if progress is not None:
            progress(number + 1, num_trees)
    report.top1, report.top5 = _hits(reference, text, first, depth)
    return report


def _check_prompt(prompt: Sequence[int], target: Target) -> None:
    window = target.config.context_window
    if not 0 < len(prompt) < window:
        raise InputError(
            f"the prompt has {len(prompt)} tokens; it must have at least one, and fewer than the "
            f"{window} that the context window holds with the answer: give another --prompt"
        )


def _reference(source: HeadsSource, target: Target, model: str) -> Reference:
    output = target.output_rows(torch.arange(target.config.vocab_size)).double().cpu()
    matrices = TargetMatrices(
        target.embedding().cpu(), lambda features: output @ features, target.config
    )
    if not source.is_own_format:
        return Reference(strip_prefix(source.tensors()), matrices)
    config = read_heads_file(source.files[0]).config
    heads = load_heads(
        source.files[0],
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        target=model,
    )
    named = published_names(config, heads.state_dict())
    return Reference(named, matrices, config.embed_scale)


@torch.inference_mode()
def _plain_text(target: Target, tokens: list[int], num_tokens: int) -> _Text:
    """Decode greedily, one token a step; keep every hidden state."""
    room = target.config.context_window - len(tokens)
    cache = target.new_cache(len(tokens) + num_tokens)
    hidden: list[Tensor] = []
    fresh = list(tokens)
    for _ in range(max(1, min(num_tokens, room))):
        depths = np.arange(len(fresh), dtype=np.int64)
        out = target.forward([Segment(cache, torch.tensor(fresh), depths, logits="last")])
        cache.commit(range(len(fresh)))
        hidden.append(out.hidden[0].clone())
        fresh = [int(out.logits[0][-1].argmax())]
        tokens.append(fresh[0])
    return _Text(tokens, torch.cat(hidden))


def _draft(drafter: Drafter, text: _Text, t: int, plan: Topology) -> DraftTree:
    """Fill a tree behind x_{t+1}; half of the text comes by steps, as in decoding."""
    split = max(1, (t + 1) // 2)
    state = drafter.prefill(text.tokens[:split], text.hidden[:split], text.tokens[split])
    for start in range(split, t + 1, 3):
        stop = min(start + 3, t + 1)
        drafter.commit(state, text.hidden[start:stop], text.tokens[start + 1 : stop + 1])
    return drafter.draft([DraftRequest(state, text.tokens[t + 1], plan)])[0]


def _compare(
    report: VerifyReport,
    reference: Reference,
    text: _Text,
    t: int,
    tree: DraftTree,
    tolerance: float,
) -> None:
    """Judge each node, given the tokens that were drafted above it."""
    tokens, topology = tree.tokens.tolist(), tree.topology
    hidden, known = text.hidden[: t + 1].cpu(), text.tokens[: t + 2]
    for parent, children in enumerate(topology.children):
        if not children:
            continue
        path = [tokens[node] for node in topology.path_nodes(parent)[1:]]
        scores = reference.scores(hidden, known, path)
        order = torch.argsort(scores, descending=True, stable=True)
        for child in children:
            token, expected = tokens[child], int(order[topology.paths[child - 1][-1]])
            gap = abs(float(scores[token] - scores[expected]))
            report.nodes += 1
            if token == expected:
                report.equal += 1
            elif gap <= tolerance:
                report.near_ties += 1
            else:
                report.wrong.append(WrongNode(t, topology.paths[child - 1], token, expected, gap))


def _hits(
    reference: Reference, text: _Text, first: int, depth: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Shares of positions where the target's own token is among the first choices."""
    top1, top5 = [], []
    for d in range(1, depth + 1):
        ranks = []
        for t in range(first, len(text.hidden) - d, 2):
            path = text.tokens[t + 2 : t + 1 + d]
            scores = reference.scores(text.hidden[: t + 1].cpu(), text.tokens[: t + 2], path)
            ranks.append(int((scores > scores[text.tokens[t + 1 + d]]).sum()))
        if ranks:
            top1.append(sum(rank == 0 for rank in ranks) / len(ranks))
            top5.append(sum(rank < _WIDTH for rank in ranks) / len(ranks))
    return tuple(top1), tuple(top5)
