"""From one row of logits to one token, the same way in plain and in tree decoding.

    token(position, logits) = argmax(logits)                                       temperature 0
                            = argmax(warp(logits) + gumbel(seed, position, id))    temperature > 0

The noise is a function of (seed, position, token id) and of nothing else, so a token does not
depend on how tokens were grouped into steps. Adding standard Gumbel noise to log-probabilities and
taking the arg-max draws from the distribution (Gumbel-max trick). Ties go to the lower token id.
"""

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from entmtp.params import MAX_SEED, SamplingParams

__all__ = [
    "LEAST_TEMPERATURE",
    "Noise",
    "choose_token",
    "derive_seed",
    "draw_seed",
    "entropy_and_top1",
    "greedy_tokens",
    "gumbel",
    "gumbel_noise",
    "noise_words",
    "penalize",
    "philox",
    "rough_gumbel",
    "stable_top_k",
    "tempered",
    "token_scores",
    "warp",
]

_MASK32 = 0xFFFFFFFF
_FIRST_NUCLEUS = 256

LEAST_TEMPERATURE = 1e-30
"""Below it the noise decides nothing."""


def draw_seed() -> int:
    """A fresh seed from the operating system, short enough to copy by hand."""
    return secrets.randbelow(2**32)


def derive_seed(seed: int, index: int) -> int:
    """Seed of row ``index`` of a batch: distinct per row, and ``seed`` itself for row 0.

    The mixing is one round of splitmix64, kept to 63 bits.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & MAX_SEED


def philox(counter: tuple[Tensor | int, int, int, int], key: int) -> Tensor:
    """Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011).

    Args:
        counter: four 32-bit words; the first may be an int64 tensor of shape ``(B,)``.
        key: 64 bits, low word first.

    Returns:
        int64 ``(B, 4)`` with values in [0, 2**32), on the device of the counter.
    """
    first = torch.as_tensor(counter[0], dtype=torch.int64).reshape(-1)
    c0, c1, c2, c3 = first, *(torch.full_like(first, word & _MASK32) for word in counter[1:])
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(10):
        # int64 products wrap, but their low 64 bits are those of the unsigned product
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=1)


def gumbel_noise(
    seed: int, position: int, num_tokens: int, device: torch.device | None = None
) -> Tensor:
    """Standard Gumbel noise for token ids ``0 .. num_tokens - 1`` at one position.

    Token id t takes word t % 4 of the Philox block with counter (t // 4, position). A word w
    becomes u = (w + 1/2) / 2**32, so 0 < u < 1 and the noise lies within (-3.2, 22.9).

    Returns:
        float32 ``(num_tokens,)``, computed in float64.
    """
    return gumbel(noise_words(seed, position, num_tokens, device))


def noise_words(
    seed: int, position: int, num_tokens: int, device: torch.device | None = None
) -> Tensor:
    """The int64 ``(num_tokens,)`` words that :func:`gumbel_noise` is made of."""
    blocks = torch.arange((num_tokens + 3) // 4, dtype=torch.int64, device=device)
    return philox((blocks, position, position >> 32, 0), seed).reshape(-1)[:num_tokens]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise of words in [0, 2**32), as :func:`gumbel_noise` makes it of them.

    Args:
        words: of any integer dtype and shape; each one's noise depends on it alone.

    Returns:
        float32, computed in float64.
    """
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().to(torch.float32).neg_()


def rough_gumbel(words: Tensor) -> Tensor:
    """:func:`gumbel` in single precision throughout, which is faster.

    Within 1e-4 of it above -2, and minus infinity where float32 holds no word so small; enough to
    rank drafts by, whose ranks no token depends on.

    Args:
        words: int64, each in [0, 2**32), or float32 ``2**32 - 1 - word``.
    """
    if words.dtype != torch.float32:
        words = (0xFFFFFFFF - words).to(torch.float32)
    rest = words.add(0.5).mul_(-(2.0**-32))  # u - 1, which is small where it matters
    return rest.log1p_().neg_().log_().neg_()


class Noise(Protocol):
    """The noise of one sequence, for callers that want no more of it than decides."""

    def best(self, scores: Tensor, position: int) -> int:
        """Arg-max of float32 ``(V,)`` scores plus :func:`gumbel_noise`; ties to the lower id."""

    def best_tempered(self, logits: Tensor, temperature: float, position: int) -> int:
        """:meth:`best` of :func:`tempered` logits."""


def stable_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, in falling order; ties go to the lower index.

    Equals the first k of a stable sort, but sorts only where a tie makes that necessary.

    Args:
        values: ``(..., V)`` without NaN.
        k: at most V.

    Returns:
        values and int64 indices, both ``(..., k)``.
    """
    size = values.shape[-1]
    top, index = torch.topk(values, min(k + 1, size), dim=-1)
    if bool((top[..., 1:] == top[..., :-1]).any()):
        top, index = torch.sort(values, dim=-1, descending=True, stable=True)
    return top[..., :k], index[..., :k]


def penalize(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """Logits after repetition, presence and frequency penalties.

    Args:
        logits: float32 ``(V,)``, left as it is.
        params: the penalties.
        prompt: counted by ``repetition_penalty`` alone.
        generated: all tokens emitted before this position, the path of a tree node included.
    """
    if not params.has_penalties:
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *generated}), dtype=torch.int64, device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    counts = Counter(generated)
    ids = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
    times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
    logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    return logits


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Float32 ``(V,)`` scores: logits less the greatest, over the temperature.

    The best score is 0: next to large ones the noise would be rounded away, and tiny temperatures
    would overflow; below :data:`LEAST_TEMPERATURE` only the most probable tokens are left, whatever
    the value.
    """
    return (logits - logits.max()).div_(max(temperature, LEAST_TEMPERATURE))


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p and min-p; dropped tokens become ``-inf``.

    Args:
        logits: float32 ``(V,)``, penalties applied; ``params.temperature`` must be > 0.

    Returns:
        float32 ``(V,)``; at least one entry is finite. Probabilities are its softmax.
    """
    scores = tempered(logits, params.temperature)
    if 0 < params.top_k < scores.numel():
        _, keep = stable_top_k(scores, params.top_k)
        scores = torch.full_like(scores, -math.inf).index_copy_(0, keep, scores[keep])
    if params.top_p < 1:
        keep = _nucleus(scores, params.top_p)
        scores = torch.full_like(scores, -math.inf).index_copy_(0, keep, scores[keep])
    if params.min_p > 0:
        floor = scores.max() + math.log(params.min_p)
        scores = torch.where(scores < floor, -math.inf, scores)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Indices of the best tokens, as many as are needed to reach a mass; at least one.

    A token is kept where those before it have less than the mass. Few are needed as a rule, so the
    row is sorted no further than that.
    """
    probs, size, count = torch.softmax(scores, dim=0), scores.numel(), _FIRST_NUCLEUS
    while True:
        _, index = stable_top_k(scores, min(count, size))
        own = probs[index]
        is_beyond = torch.cumsum(own, dim=0) - own >= top_p
        is_beyond[0] = False  # a top_p below the smallest float32 compares as 0
        beyond = torch.nonzero(is_beyond)
        if len(beyond):
            return index[: int(beyond[0])]
        if count >= size:
            return index
        count *= 8


def token_scores(
    logits: Tensor,
    params: SamplingParams,
    seed: int,
    position: int,
    history: tuple[Sequence[int], Sequence[int]],
) -> Tensor:
    """The float32 ``(V,)`` row whose arg-max is the token; arguments as :func:`choose_token`."""
    scores = penalize(logits.to(torch.float32), params, *history)
    if params.is_greedy:
        return scores
    return warp(scores, params) + gumbel_noise(seed, position, scores.numel(), scores.device)


def choose_token(
    logits: Tensor,
    params: SamplingParams,
    seed: int,
    position: int,
    history: tuple[Sequence[int], Sequence[int]],
    noise: Noise | None = None,
) -> int:
    """The target's token at one position: the one rule of plain and of tree decoding.

    Args:
        logits: ``(V,)`` raw logits of the row before ``position``, any float dtype.
        params: warps and penalties.
        seed: of this sequence; unused at temperature 0.
        position: absolute index, from 0, that the token will take in its sequence.
        history: prompt tokens, and the tokens emitted between the prompt and ``position``.
        noise: of this seed, where there is a faster way to it than the whole row.
    """
    if noise is None or params.is_greedy:
        return int(torch.argmax(token_scores(logits, params, seed, position, history)))
    logits = penalize(logits.to(torch.float32), params, *history)
    if params.top_k == 0 and params.top_p >= 1 and params.min_p == 0:
        return noise.best_tempered(logits, params.temperature, position)
    return noise.best(warp(logits, params), position)


def greedy_tokens(logits: Tensor) -> Tensor:
    """:func:`choose_token` for all rows at once, at temperature 0 without penalties.

    Args:
        logits: ``(N, V)``.

    Returns:
        int64 ``(N,)``.
    """
    return torch.argmax(logits, dim=-1)


def entropy_and_top1(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Shannon entropy in nats and top-1 probability of softmax over raw logits.

    Args:
        logits: ``(..., V)``; ``-inf`` entries have probability 0. Computed in float32.

    Returns:
        float32 entropies and probabilities, both ``(...)``; NaN where a row holds NaN or infinity.
    """
    probs = torch.softmax(logits.to(torch.float32), dim=-1)
    return torch.special.entr(probs).sum(dim=-1), probs.amax(dim=-1)
