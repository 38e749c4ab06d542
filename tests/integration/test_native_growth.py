"""Trees that the core grows: those of the slow twin, in one call."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from draft_cases import DRAFTERS, Text, core_drafter, make_heads
from entmtp.drafters.base import Coupling, Drafter, DraftRequest, GrownTree, GrowRequest
from entmtp.drafters.picking import ScoredRows, set_best_children
from entmtp.growth import (
    CODES_PER_NAT,
    COPY_RANK,
    MAX_COPY,
    NUM_CODES,
    UNSCORED,
    Copy,
    CopyTable,
    Grower,
    GrowthCosts,
    GrowthPlan,
    GrowthRule,
)
from entmtp.noise import NoiseSource
from entmtp.topology import Topology
from native_cases import make_native, needs_library
from strategies import topologies

pytestmark = needs_library

CASE = "llama"


class _Codes:
    """Takes the best children and notes the codes of their log-probabilities."""

    takes_best = False

    def __init__(self, num_requests: int, size: int) -> None:
        self.codes = np.full((num_requests, size), UNSCORED, dtype=np.uint8)

    def pick(self, rows: ScoredRows) -> None:
        order = set_best_children(rows)
        logs = torch.log_softmax(rows.scores.to(torch.float64), dim=-1).gather(1, order)
        codes = torch.floor(-logs * CODES_PER_NAT).clamp(0, NUM_CODES - 1).to(torch.uint8)
        for at, (index, part) in enumerate(
            zip(rows.indices, torch.split(codes, list(rows.counts)), strict=True)
        ):
            level = rows.levels[at]
            own = part.numpy()[rows.parent_rows[at], level.ranks]
            self.codes[index, level.children] = own


def _depth_of(name: str) -> int:
    return make_heads(name, CASE).config.num_heads if not name.startswith("mtp") else 5


def _random_plan(envelope: Topology, seed: int) -> GrowthPlan:
    rng = np.random.default_rng(seed)
    size, depth = envelope.num_nodes, envelope.max_depth
    table = rng.random((3, size, NUM_CODES), dtype=np.float32)
    table = np.sort(table, axis=-1)[..., ::-1] if seed % 2 else table
    length = int(rng.integers(0, MAX_COPY + 1))
    copies = CopyTable(rng.random((4, length)), rng.random((4, length))) if length else None
    rule = GrowthRule(envelope, table, rng.random((3, depth)), copies)
    rows = np.cumsum(rng.random(size + length + 1)) + 1
    costs = GrowthCosts(rows, rng.random(depth) * 0.4, rng.random(depth) * 0.2)
    rate = float(rng.choice([0.0, 0.2, 0.5, 1.0, 4.0]))
    limit = int(rng.integers(0, max(depth, length) + 2))
    return GrowthPlan(rule, costs, int(rng.integers(3)), rate, limit)


def _random_copy(drafter: Drafter, text: Text, request: GrowRequest, seed: int) -> Copy | None:
    """Some tokens of a path that the drafter proposes, then others; sometimes nothing."""
    rng = random.Random(seed)
    envelope = request.plan.rule.envelope
    whole = DraftRequest(text.start(drafter, CASE), request.root, envelope, request.coupling)
    [tokens] = drafter.fill([whole], _Codes(1, envelope.num_rows))  # type: ignore[attr-defined]
    path = envelope.path_nodes(rng.randrange(envelope.num_rows))[1:]
    followed = [int(tokens[node]) for node in path][: rng.randrange(4)]
    followed += [rng.randrange(40) for _ in range(rng.randrange(MAX_COPY - 4))]
    return Copy(rng.randrange(4), tuple(followed)) if followed else None


def _coupling(number: int) -> Coupling | None:
    if number % 2:
        return None
    vocab_size = make_native(CASE).config.vocab_size
    return Coupling(NoiseSource(number, vocab_size), 0.7, 20 + number)


def _by_hand(
    drafter: Drafter, text: Text, request: GrowRequest
) -> tuple[tuple[list[int], int], set[int]]:
    """Nodes kept, where the copy hangs, and nodes scored, from the codes of the whole envelope."""
    whole = DraftRequest(
        text.start(drafter, CASE), request.root, request.plan.rule.envelope, request.coupling
    )
    picker = _Codes(1, whole.plan.num_rows)
    [tokens] = drafter.fill([whole], picker)  # type: ignore[attr-defined]
    grower = Grower(request.plan, request.copy)
    scored: set[int] = set()
    for depth, level in enumerate(whole.plan.levels):
        rows = grower.open_rows(depth)
        if not rows:
            break
        parents = level.parents[level.parent_rows]
        children = [int(c) for c, p in zip(level.children, parents, strict=True) if int(p) in rows]
        codes = [int(picker.codes[0, c]) for c in children]
        grower.take(children, codes, grower.copied(children, tokens[children].tolist()))
        scored |= set(children)
    return grower.keep(), scored


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_a_whole_envelope_is_that_of_filling_it(name: str) -> None:
    """Tokens, and codes of all nodes, with and without noise."""
    depth = _depth_of(name)
    envelope = Topology.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (1, 1), (0, 2, 0)])
    envelope = envelope.truncate(depth)
    drafter = core_drafter(name, CASE, 2)
    texts = [Text(0, 9, (2, 1), drafts_between=True), Text(1, 131), Text(2, 3, (1,))]
    requests = [
        GrowRequest(
            text.start(drafter, CASE),
            text.root(CASE),
            GrowthPlan.whole(envelope),
            _coupling(text.number),
        )
        for text in texts
    ]
    grown = drafter.grow(requests)  # type: ignore[attr-defined]
    fills = [
        DraftRequest(text.start(drafter, CASE), r.root, envelope, r.coupling)
        for text, r in zip(texts, requests, strict=True)
    ]
    picker = _Codes(len(texts), envelope.num_rows)
    filled = drafter.fill(fills, picker)  # type: ignore[attr-defined]
    for at, (one, tokens) in enumerate(zip(grown, filled, strict=True)):
        assert_array_equal(one.tokens, tokens)
        assert_array_equal(one.codes, picker.codes[at])
        assert sorted(one.kept) == list(range(1, envelope.num_rows))
        assert torch.equal(one.tree.tokens, tokens)
        assert one.tree.topology == envelope


@settings(max_examples=60)
@given(st.data(), st.sampled_from(list(DRAFTERS)), st.integers(1, 3))
def test_trees_grow_as_those_of_the_twin(data: st.DataObject, name: str, threads: int) -> None:
    """Which rows are evaluated, which nodes are kept, and their tokens; alone and in a batch."""
    drafter = core_drafter(name, CASE, threads)
    trees = topologies(max_nodes=24, max_depth=_depth_of(name)).filter(lambda t: t.num_nodes > 0)
    texts, requests = [], []
    for number in range(data.draw(st.integers(1, 3), label="texts")):
        text = Text(number, data.draw(st.sampled_from((1, 17, 128)), label="size"))
        plan = _random_plan(data.draw(trees, label="envelope"), data.draw(st.integers(0, 10**6)))
        state = text.start(drafter, CASE)
        request = GrowRequest(state, text.root(CASE), plan, _coupling(number))
        copy = _random_copy(drafter, text, request, data.draw(st.integers(0, 10**6)))
        requests.append(replace(request, copy=copy))
        texts.append(text)
    grown: list[GrownTree] = drafter.grow(requests)  # type: ignore[attr-defined]
    for text, request, found in zip(texts, requests, grown, strict=True):
        (kept, attach), scored = _by_hand(drafter, text, request)
        assert list(found.kept) == kept
        assert found.attach == attach
        assert set(np.flatnonzero(found.codes != UNSCORED).tolist()) == scored
        _check_tree(drafter, text, request, found)


def _check_tree(drafter: Drafter, text: Text, request: GrowRequest, found: GrownTree) -> None:
    """Nodes of the envelope hold what filling gives, the others the copy; no child twice."""
    tree = found.tree
    paths = tree.topology.paths
    own = Topology(tuple(path for path in paths if COPY_RANK not in path))
    state = text.start(drafter, CASE)
    [filled] = drafter.draft([DraftRequest(state, request.root, own, request.coupling)])
    expected = dict(zip(own.paths, filled.tokens[1:].tolist(), strict=True))
    for path, token in zip(paths, tree.tokens[1:].tolist(), strict=True):
        if COPY_RANK not in path:
            assert token == expected[path]
        else:
            assert request.copy is not None
            assert token == request.copy.tokens[len(path) - 1]
    for children in tree.topology.children:
        tokens = tree.tokens[list(children)].tolist()
        assert len(set(tokens)) == len(tokens)


def test_a_drafter_goes_on_after_growing() -> None:
    """Growing leaves nothing behind: the next tree is that of a drafter which never grew."""
    rng = random.Random(5)
    for name in DRAFTERS:
        drafter = core_drafter(name, CASE, 2)
        envelope = Topology.from_paths([(0,), (1,), (0, 0), (0, 1)]).truncate(_depth_of(name))
        text = Text(0, 20)
        grown, plain = text.start(drafter, CASE), text.start(drafter, CASE)
        for step in range(4):
            plan = _random_plan(envelope, rng.randrange(10**6))
            drafter.grow([GrowRequest(grown, 7, plan)])  # type: ignore[attr-defined]
            hidden = text.hidden(CASE, 30)[20 + step : 21 + step]
            for state in (grown, plain):
                drafter.commit(state, hidden, [step])
        one, other = drafter.draft([DraftRequest(s, 9, envelope) for s in (grown, plain)])
        assert torch.equal(one.tokens, other.tokens)
