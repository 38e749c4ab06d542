"""Verification: which nodes of a draft tree are kept, and the bonus token. Pure functions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.params import TypicalParams
from entmtp.topology import Topology

__all__ = ["VerifyResult", "verify_exact", "verify_typical"]


@dataclass(frozen=True)
class VerifyResult:
    """Outcome of a step.

    Attributes:
        nodes: the root and the accepted nodes, from the root down.
        tokens: the accepted tokens, then the bonus token: what the step emits.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def verify_exact(
    topology: Topology,
    draft_tokens: Sequence[int],
    target_token: Callable[[int, Sequence[int]], int],
) -> VerifyResult:
    """Walk from the root: move to the child that carries the target's token, else stop.

    Args:
        topology: shape.
        draft_tokens: N tokens, the root's first.
        target_token: ``(node, emitted)`` -> the target's own token after that node, where
            ``emitted`` are the tokens accepted below the root so far. Called once a visited node.
    """
    nodes, emitted = [0], list[int]()
    while True:
        token = target_token(nodes[-1], emitted)
        emitted.append(token)
        child = next((c for c in topology.children[nodes[-1]] if draft_tokens[c] == token), None)
        if child is None:
            return VerifyResult(tuple(nodes), tuple(emitted))
        nodes.append(child)


def verify_typical(
    topology: Topology,
    draft_tokens: Sequence[int],
    logits: Tensor,
    temperature: float,
    params: TypicalParams,
) -> VerifyResult:
    """Keep the longest path whose tokens are typical; **lossy**.

    A token x after a node is kept when p(x) > min(eps, delta * exp(-H)), p = softmax(logits / T)
    and H its entropy. Of equally long paths the one with the largest sum of log p wins, then the
    first. The bonus token is the arg-max after the last kept node, as in the published code.

    Args:
        topology: shape.
        draft_tokens: N tokens, the root's first.
        logits: ``(N, V)`` raw logits.
        temperature: T; 0 is read as 1, as only probabilities matter here.
        params: eps and delta.
    """
    log_probs = torch.log_softmax(logits.to(torch.float32) / (temperature or 1.0), dim=-1)
    entropy = -(log_probs.exp() * log_probs).nan_to_num(0.0).sum(dim=-1)
    floor = torch.clamp(
        params.posterior_alpha * torch.exp(-entropy), max=params.posterior_threshold
    ).tolist()
    scores: list[tuple[int, float] | None] = [(0, 0.0)]
    for node in range(1, topology.num_rows):
        parent = int(topology.parents[node])
        above = scores[parent]
        log_prob = float(log_probs[parent, draft_tokens[node]])
        is_kept = above is not None and math.exp(log_prob) > floor[parent]
        scores.append((above[0] + 1, above[1] + log_prob) if above and is_kept else None)
    best = max(range(len(scores)), key=lambda n: (scores[n] or (-1, 0.0), -n))
    nodes = topology.path_nodes(best)
    bonus = int(torch.argmax(logits[best]))
    return VerifyResult(tuple(nodes), (*(draft_tokens[n] for n in nodes[1:]), bonus))
