"""Sampling through draft trees draws from the target's own distribution."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine
from entmtp.params import SamplingParams
from entmtp.sampling import choose_token, philox, warp
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Segment
from entmtp.topology import Topology
from entmtp.verify import verify_exact
from exactness import NONE, outcome
from fakes import ByteTokenizer, ScriptedDrafter, tiny_target

VOCAB, NUM_RUNS = 6, 20_000
TARGET = tiny_target(seed=2, dtype=torch.float64, scale=0.15, vocab_size=VOCAB)
PROMPT, ROOT = (2, 3), 4
TREES = {
    "none": Topology(()),
    "chain": Topology.from_paths([(0,), (0, 0), (0, 0, 0)]),
    "gaps": Topology.from_paths([(1,), (4,), (4, 0), (4, 2), (1, 5), (4, 2, 1)]),
    "bushy": Topology.from_paths(
        [(a,) for a in range(5)] + [(a, b) for a in (0, 3) for b in (0, 1)]
    ),
}
SAMPLINGS = {
    "temperature+top-p": SamplingParams(temperature=0.7, top_p=0.85),
    "temperature+top-k": SamplingParams(temperature=1.4, top_k=3),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
}


def child_token(above: Sequence[int], rank: int) -> int:
    """A draft that is no better than chance: siblings hold different tokens."""
    return (above[-1] + 1 + rank) % VOCAB


# -- exact probabilities, from logits, in plain Python ---------------------------------------------


@cache
def logits_after(tokens: tuple[int, ...]) -> tuple[float, ...]:
    """The target's logits after a text, from one forward over all of it."""
    segment = Segment(TARGET.new_cache(8), torch.tensor(tokens), np.arange(len(tokens)))
    return tuple(TARGET.forward([segment]).logits[0][-1].tolist())


def distribution(tokens: tuple[int, ...], params: SamplingParams) -> list[float]:
    """The warped distribution of the next token, each rule by its definition."""
    weights = [math.exp(x / params.temperature) for x in logits_after(tokens)]
    order = sorted(range(VOCAB), key=lambda t: (-weights[t], t))
    kept = order[: params.top_k or VOCAB]
    total, mass, nucleus = sum(weights[t] for t in kept), 0.0, list[int]()
    for token in kept:
        if mass < params.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    alive = [t for t in nucleus if weights[t] >= params.min_p * weights[order[0]]]
    return [
        weights[t] / sum(weights[a] for a in alive) if t in alive else 0.0 for t in range(VOCAB)
    ]


def pair_distribution(params: SamplingParams) -> dict[tuple[int, int], float]:
    """Probabilities of the two tokens after the root."""
    text = (*PROMPT, ROOT)
    first = distribution(text, params)
    second = [distribution((*text, token), params) for token in range(VOCAB)]
    return {(a, b): first[a] * second[a][b] for a in range(VOCAB) for b in range(VOCAB)}


def critical_value(degrees: int, z: float = 3.09) -> float:
    """Of chi-square at p = 0.001, by the approximation of Wilson and Hilferty."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + z * math.sqrt(part)) ** 3


def chi_square(
    counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]
) -> tuple[float, float]:
    """The statistic and its critical value; cells with fewer than 5 expected are pooled."""
    total = sum(counts.values())
    assert all(expected[pair] > 0 for pair in counts), "a token outside the support was drawn"
    cells = [(counts[pair], total * p) for pair, p in expected.items() if total * p >= 5]
    rare = [(counts[pair], total * p) for pair, p in expected.items() if 0 < total * p < 5]
    if rare:
        cells.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    return sum((c - e) ** 2 / e for c, e in cells), critical_value(len(cells) - 1)


# -- runs ------------------------------------------------------------------------------------------


def tree_rows(tree: Topology) -> tuple[list[int], Tensor]:
    """Tokens of the draft tree, and the target's logits at its nodes, root first."""
    drafter = ScriptedDrafter(child_token)
    tokens = [ROOT]
    for path in tree.paths:
        parent = tree.paths.index(path[:-1]) + 1 if len(path) > 1 else 0
        tokens.append(drafter._token([tokens[parent]], path[-1]))
    prefix = TARGET.new_cache(16)
    TARGET.forward([Segment(prefix, torch.tensor(PROMPT), np.arange(2), logits="none")])
    prefix.commit([0, 1])
    mask = tree.ancestor_mask if tree.num_nodes else None
    segment = Segment(prefix, torch.tensor(tokens), tree.depths, mask)
    return tokens, TARGET.forward([segment]).logits[0]


@cache
def noise(position: int) -> Tensor:
    """The Gumbel noise ``(NUM_RUNS, VOCAB)`` of seeds 0, 1, ... at one position, all at once."""
    seeds = torch.arange(NUM_RUNS)
    blocks = [torch.full_like(seeds, block) for block in range((VOCAB + 3) // 4)]
    words = torch.cat([philox((b, position, 0, 0), seeds) for b in blocks], dim=1)  # type: ignore[arg-type]
    uniform = (words[:, :VOCAB].double() + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).float()


def draw(row: Sequence[float], params: SamplingParams, position: int) -> list[int]:
    """The token that each seed gives to a row of logits."""
    scores = warp(torch.tensor(row), params)
    return torch.argmax(scores + noise(position), dim=1).tolist()


def draw_pairs(tree: Topology, params: SamplingParams) -> Counter[tuple[int, int]]:
    """Counts of the two tokens after the root: from one step where the tree allows, else two."""
    tokens, logits = tree_rows(tree)
    first = len(PROMPT) + 1
    after_node = [
        draw(row, params, first + depth)
        for row, depth in zip(logits.tolist(), tree.depths.tolist(), strict=True)
    ]
    after_token = [
        draw(logits_after((*PROMPT, ROOT, token)), params, first + 1) for token in range(VOCAB)
    ]
    counts = Counter[tuple[int, int]]()
    for seed in range(NUM_RUNS):
        result = verify_exact(tree, tokens, lambda node, _, seed=seed: after_node[node][seed])
        if len(result.tokens) > 1:
            counts[result.tokens[0], result.tokens[1]] += 1
        else:
            (token,) = result.tokens
            counts[token, after_token[token][seed]] += 1
    return counts


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drawing_for_all_seeds_at_once_is_the_one_rule(params: SamplingParams) -> None:
    """The fast draw of these tests gives the tokens of the rule that the engine uses."""
    row = logits_after((*PROMPT, ROOT))
    expected = [choose_token(torch.tensor(row), params, seed, 3, ((), ())) for seed in range(100)]
    assert draw(row, params, 3)[:100] == expected


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_two_tokens_through_any_tree_follow_the_targets_distribution(
    params: SamplingParams, tree: Topology
) -> None:
    """Over 20,000 seeds, the pairs of tokens pass a chi-square test against exact probabilities."""
    statistic, critical = chi_square(draw_pairs(tree, params), pair_distribution(params))
    assert statistic < critical


def test_the_chi_square_test_sees_a_wrong_temperature() -> None:
    """The test above is no empty promise: it fails where the temperature is 5 % off."""
    counts = draw_pairs(TREES["bushy"], SamplingParams(temperature=1.0))
    statistic, critical = chi_square(counts, pair_distribution(SamplingParams(temperature=1.05)))
    assert statistic > critical


def engines() -> list[Engine]:
    """One a tree."""
    return [
        Engine(TARGET, ScriptedDrafter(child_token), FixedScheduler(name, tree), ByteTokenizer())
        for name, tree in TREES.items()
    ]


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_tree_decoding_equals_plain_sampling_with_the_same_seed(
    params: SamplingParams,
) -> None:
    """Stronger than the same distribution: every row of a batch gives the same tokens."""
    sampling = SamplingParams(
        max_new_tokens=12,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=5,
    )
    plain = Engine(TARGET, EmptyDrafter(), NONE, ByteTokenizer())
    expected = [outcome(r) for r in plain.generate_batch([PROMPT] * 8, sampling)]
    assert len({tokens for tokens, *_ in expected}) > 4
    for engine in engines():
        assert [outcome(r) for r in engine.generate_batch([PROMPT] * 8, sampling)] == expected


@pytest.mark.parametrize("changes", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_a_nucleus_of_one_token_is_greedy(changes: dict[str, float]) -> None:
    """Whatever the noise, a distribution cut to its best token gives the greedy text."""
    greedy = engines()[0].generate(PROMPT, SamplingParams(max_new_tokens=12)).token_ids
    for seed, engine in enumerate(engines()):
        sampling = SamplingParams(max_new_tokens=12, temperature=2.0, seed=seed, **changes)  # type: ignore[arg-type]
        assert engine.generate(PROMPT, sampling).token_ids == greedy
