"""Drafters that grow trees: what a whole envelope gives, less what is not worth it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entmtp.drafters.base import (
    Coupling,
    Drafter,
    GrowingDrafter,
    GrowRequest,
    check_depth,
)
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.growing import probability_codes
from entmtp.drafters.picking import ScoredRows, set_best_children
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.errors import TopologyError
from entmtp.growth import UNSCORED, Copy, GrowthPlan
from entmtp.loading.drafters import make_torch_drafter
from entmtp.noise import NoiseSource
from entmtp.topology import Topology
from exactness import random_heads
from fakes import tiny_target
from growing import by_hand, check_tree, filling, random_copy, random_envelope, random_plan

VOCAB = 40
TARGET = tiny_target(seed=5, dtype=torch.float64, vocab_size=VOCAB, context_window=512)
KINDS = ("medusa", "hydra", "hydra++", "mtp")

every_kind = pytest.mark.parametrize("kind", KINDS)
seeds = st.integers(0, 10**6)


class CountingRows:
    """Notes how many rows are scored at each call; joined with the heads of a kind."""

    counts: tuple[int, ...] = ()

    def logits(self, head: int, features: Tensor) -> Tensor:
        self.counts = (*self.counts, len(features))
        return super().logits(head, features)  # type: ignore[misc]


@lru_cache
def make(kind: str) -> tuple[GrowingDrafter, CountingRows]:
    """A drafter with random weights, and its module."""
    sound = random_heads(kind, TARGET, 4)
    made = type("Counting", (CountingRows, type(sound)), {})
    heads = made(sound.config, sound.hot_ids).to(TARGET.dtype)
    heads.load_state_dict(sound.state_dict())
    return make_torch_drafter(heads, TARGET), heads  # type: ignore[return-value]


def grow_request(
    drafter: Drafter, plan: GrowthPlan, seed: int, is_coupled: bool = False
) -> GrowRequest:
    """A text of its own, read in two pieces."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size, step = rng.randint(1, 9), rng.randint(1, 4)
    hidden = torch.randn(
        size + step, TARGET.config.hidden_size, generator=generator, dtype=torch.float64
    )
    tokens = [rng.randrange(VOCAB) for _ in range(size + step + 1)]
    state = drafter.prefill(tokens[:size], hidden[:size], tokens[size])
    drafter.commit(state, hidden[size:], tokens[size + 1 :])
    coupling = Coupling(NoiseSource(seed, VOCAB), 0.8, len(tokens)) if is_coupled else None
    request = GrowRequest(state, tokens[-1], plan, coupling)
    return replace(request, copy=random_copy(drafter, request, seed, VOCAB))


def whole(request: GrowRequest) -> GrowRequest:
    """Ask for the whole envelope to be grown."""
    plan = GrowthPlan.whole(request.plan.rule.envelope)
    return GrowRequest(request.state, request.root, plan, request.coupling)


class LogProbs:
    """Takes the best children and keeps their log-probabilities."""

    takes_best = False

    def __init__(self, num_rows: int) -> None:
        self.values = np.zeros(num_rows)

    def pick(self, rows: ScoredRows) -> None:
        order = set_best_children(rows)
        own = torch.log_softmax(rows.scores, dim=1).gather(1, order).numpy()
        self.values[rows.levels[0].children] = own[rows.parent_rows[0], rows.levels[0].ranks]


@every_kind
@given(seed=seeds, is_coupled=st.booleans())
@settings(max_examples=20)
def test_a_whole_plan_fills_the_envelope(kind: str, seed: int, is_coupled: bool) -> None:
    """The tokens of a static tree, and the codes of the log-probabilities before any noise."""
    drafter, _ = make(kind)
    plan = GrowthPlan.whole(random_envelope(random.Random(seed)))
    request = grow_request(drafter, plan, seed, is_coupled)
    (tree,) = drafter.grow([replace(request, copy=None)])
    picker = LogProbs(plan.rule.envelope.num_rows)
    (tokens,) = drafter.fill([filling(request)], picker)  # type: ignore[attr-defined]
    assert tree.tokens.tolist() == tokens.tolist()
    (drafted,) = drafter.draft([filling(request)])
    assert drafted.tokens.tolist() == tokens.tolist()
    eighths = -8 * picker.values[1:]
    assert (np.floor(np.clip(eighths - 1e-4, 0, 63)) <= tree.codes[1:]).all()
    assert (np.floor(np.clip(eighths + 1e-4, 0, 63)) >= tree.codes[1:]).all()
    assert tree.codes[0] == UNSCORED
    assert sorted(tree.kept) == list(range(1, plan.rule.envelope.num_rows))
    assert tree.tree.topology == plan.rule.envelope
    assert tree.tree.tokens.tolist() == tokens.tolist()


@every_kind
@given(seed=seeds, is_coupled=st.booleans())
@settings(max_examples=40)
def test_a_grown_tree_is_what_is_worth_it_of_the_envelope(
    kind: str, seed: int, is_coupled: bool
) -> None:
    """The same nodes, codes and tokens as by scoring everything first, and no row more."""
    drafter, heads = make(kind)
    plan = random_plan(seed, random_envelope(random.Random(seed)))
    request = grow_request(drafter, plan, seed, is_coupled)
    (everything,) = drafter.grow([whole(request)])
    opened, codes, (kept, attach) = by_hand(request, everything.codes, everything.tokens.tolist())
    heads.counts = ()
    (tree,) = drafter.grow([request])
    assert heads.counts == tuple(1 if kind == "medusa" else len(rows) for rows in opened)
    assert (list(tree.kept), tree.attach) == (kept, attach)
    assert tree.codes.tolist() == codes.tolist()
    expected = np.where(codes != UNSCORED, everything.tokens, request.root)
    assert tree.tokens[: len(expected)].tolist() == expected.tolist()
    assert sorted(plan.rule.subtree(kept, attach).nodes[1:].tolist()) == sorted(kept)
    check_tree(drafter, request, request.state, tree)


def test_the_cases_above_keep_all_some_and_no_nodes() -> None:
    """They are no empty promise."""
    drafter, _ = make("hydra")
    shares, scored, copied = set(), set(), set()
    for seed in range(100):
        plan = random_plan(seed, random_envelope(random.Random(seed)))
        (tree,) = drafter.grow([grow_request(drafter, plan, seed)])
        size = plan.rule.envelope.num_nodes
        own = sum(node <= size for node in tree.kept)
        shares.add((own > 0) + (own == size))
        num_scored = int((tree.codes != UNSCORED).sum())
        scored.add((num_scored > 0) + (num_scored == size))
        copied |= {(own > 0, tree.attach > 0)} if own < len(tree.kept) else set()
    assert shares == scored == {0, 1, 2}
    assert copied == {(False, False), (True, False), (True, True)}


@every_kind
def test_a_drafter_is_not_asked_where_nothing_is_worth_it(kind: str) -> None:
    """The draft is the tree that growing gives, step after step; some are bare or copies alone."""
    drafter, heads = make(kind)
    sizes = set()
    for seed in range(60):
        plan = random_plan(seed, random_envelope(random.Random(seed)))
        request = grow_request(drafter, plan, seed)
        for asked in (request, replace(request, copy=None)) * 2:
            (grown,) = drafter.grow([asked])
            heads.counts = ()
            (drafted,) = drafter.draft([asked])
            tree = grown.tree
            assert drafted.topology is tree.topology
            assert drafted.tokens.tolist() == tree.tokens.tolist()
            assert (drafted.first, drafted.num_copied) == (tree.first, tree.num_copied)
            if plan.bare(asked.copy) is not None:
                assert heads.counts == ()
                sizes.add(tree.topology.num_nodes)
    assert {0, 1, 2} <= sizes


@every_kind
@given(seed=seeds, size=st.integers(1, 5))
@settings(max_examples=15)
def test_a_batch_grows_each_tree_as_alone(kind: str, seed: int, size: int) -> None:
    """Requests of different envelopes, rules, texts and noise do not touch each other."""
    drafter, _ = make(kind)
    requests = [
        grow_request(drafter, random_plan(n, random_envelope(random.Random(n))), n, bool(n % 2))
        for n in range(seed, seed + size)
    ]
    alone = [drafter.grow([request])[0] for request in requests]
    for one, other in zip(drafter.grow(requests), alone, strict=True):
        assert (list(one.kept), one.attach) == (list(other.kept), other.attach)
        assert one.codes.tolist() == other.codes.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()


@every_kind
def test_shapes_and_rules_in_one_batch(kind: str) -> None:
    """Trees come back in the order of the requests, each as alone; growing leaves no trace."""
    drafter, _ = make(kind)
    plans = [random_plan(seed, random_envelope(random.Random(seed))) for seed in range(8)]
    growing = [grow_request(drafter, plan, n) for n, plan in enumerate(plans)]
    mixed = [filling(r) if n % 3 == 1 else r for n, r in enumerate(growing)]
    alone = [drafter.draft([request])[0] for request in mixed]
    for _ in range(2):
        trees = drafter.draft(mixed)
        assert [t.topology for t in trees] == [t.topology for t in alone]
        assert [t.tokens.tolist() for t in trees] == [t.tokens.tolist() for t in alone]
    assert drafter.draft([]) == []


@every_kind
def test_a_plan_cut_to_the_root_evaluates_nothing(kind: str) -> None:
    """At the last token of a text; what waits to be read goes on waiting."""
    drafter, heads = make(kind)
    plan = GrowthPlan.whole(random_envelope(random.Random(3)))
    request = replace(grow_request(drafter, plan.truncate(0), 3), copy=Copy(0, (1, 2)))
    heads.counts = ()
    (tree,) = drafter.grow([request])
    assert heads.counts == ()
    assert (tree.kept, set(tree.codes.tolist())) == ([], {UNSCORED})
    assert set(tree.tokens[: plan.rule.envelope.num_rows].tolist()) == {request.root}
    assert (tree.tree.topology, tree.tree.tokens.tolist()) == (Topology(()), [request.root])


@every_kind
def test_a_truncated_plan_grows_no_deeper(kind: str) -> None:
    """The envelope stays as it is; nodes below the depth are not scored."""
    drafter, _ = make(kind)
    envelope = Topology.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    request = grow_request(drafter, GrowthPlan.whole(envelope).truncate(2), 3)
    (tree,) = drafter.grow([request])
    assert tree.tree.topology == envelope.truncate(2)
    assert tree.codes[5] == UNSCORED


def test_codes_stay_in_their_range() -> None:
    """Ties with certainty, hopeless tokens, masked ones and broken scores."""
    scores = torch.tensor([[50.0, 0.0, -float("inf")], [0.0, 0.0, 0.0], [float("nan"), 1.0, 0.0]])
    columns = torch.tensor([[0, 1, 2]] * 3)
    assert probability_codes(scores, columns).tolist() == [[0, 63, 63], [8, 8, 8], [63, 63, 63]]


@pytest.mark.parametrize(
    ("drafter", "name"), [(PromptLookupDrafter(), "lookup"), (EmptyDrafter(), "none")]
)
def test_drafters_without_probabilities_cannot_grow(drafter: Drafter, name: str) -> None:
    """The message says who, and what to do."""
    plan = GrowthPlan.whole(Topology.from_paths([(0,)]))
    for asked in (plan, plan.truncate(0)):
        with pytest.raises(TopologyError, match=rf"the {name} drafter .* fixed tree.* heads"):
            check_depth(drafter, asked)
    check_depth(EmptyDrafter(), Topology(()))


def paths(*given: Sequence[int]) -> GrowthPlan:
    """All of a tree."""
    return GrowthPlan.whole(Topology.from_paths(given))


def test_an_envelope_beyond_the_heads_is_refused() -> None:
    """Unless it is cut to their depth."""
    drafter, _ = make("hydra")
    deep = paths(*((0,) * depth for depth in range(1, 7)))
    with pytest.raises(TopologyError, match=r"6 deep.* hydra .*5 heads"):
        check_depth(drafter, deep)
    check_depth(drafter, deep.truncate(5))
    width = drafter.max_width or 0
    check_depth(drafter, paths((width - 1,)))
    with pytest.raises(TopologyError, match=f"rank {width}"):
        check_depth(drafter, paths((width,)))
