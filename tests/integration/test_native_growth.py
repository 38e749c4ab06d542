"""Trees that the core grows: those of the slow twin, in one call."""

import random
from collections.abc import Sequence
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
from entmtp.growth import CODES_PER_NAT, NUM_CODES, UNSCORED, GrowthPlan
from entmtp.noise import NoiseSource
from entmtp.topology import Topology
from growing import by_hand, check_tree, filling, random_copy, random_plan
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


def _coupling(number: int) -> Coupling | None:
    if number % 2:
        return None
    vocab_size = make_native(CASE).config.vocab_size
    return Coupling(NoiseSource(number, vocab_size), 0.7, 20 + number)


def _scored(
    drafter: Drafter, requests: Sequence[GrowRequest], texts: Sequence[Text]
) -> list[tuple[np.ndarray, list[int]]]:
    """Codes and tokens of the whole envelope of each request, from scores in torch."""
    found = []
    for text, request in zip(texts, requests, strict=True):
        whole = filling(replace(request, state=text.start(drafter, CASE)))
        picker = _Codes(1, whole.plan.num_rows)
        [tokens] = drafter.fill([whole], picker)  # type: ignore[attr-defined]
        found.append((picker.codes[0], tokens.tolist()))
    return found


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
        plan = random_plan(data.draw(st.integers(0, 10**6)), data.draw(trees, label="envelope"))
        state = text.start(drafter, CASE)
        request = GrowRequest(state, text.root(CASE), plan, _coupling(number))
        copy = random_copy(drafter, request, data.draw(st.integers(0, 10**6)))
        requests.append(replace(request, state=text.start(drafter, CASE), copy=copy))
        texts.append(text)
    grown: list[GrownTree] = drafter.grow(requests)  # type: ignore[attr-defined]
    scored = _scored(drafter, requests, texts)
    for text, request, found, (codes, tokens) in zip(texts, requests, grown, scored, strict=True):
        _, own, kept = by_hand(request, codes, tokens)
        assert (list(found.kept), found.attach) == kept
        assert_array_equal(found.codes, own)
        check_tree(drafter, request, text.start(drafter, CASE), found)
        tree, again = found.tree, replace(request, state=text.start(drafter, CASE))
        [drafted] = drafter.draft([again])  # which does not ask where nothing is worth it
        assert drafted.topology is tree.topology
        assert drafted.tokens.tolist() == tree.tokens.tolist()
        assert (drafted.first, drafted.num_copied) == (tree.first, tree.num_copied)


def test_a_drafter_goes_on_after_growing() -> None:
    """Growing leaves nothing behind: the next tree is that of a drafter which never grew."""
    rng = random.Random(5)
    for name in DRAFTERS:
        drafter = core_drafter(name, CASE, 2)
        envelope = Topology.from_paths([(0,), (1,), (0, 0), (0, 1)]).truncate(_depth_of(name))
        text = Text(0, 20)
        grown, plain = text.start(drafter, CASE), text.start(drafter, CASE)
        for step in range(4):
            plan = random_plan(rng.randrange(10**6), envelope)
            drafter.grow([GrowRequest(grown, 7, plan)])  # type: ignore[attr-defined]
            hidden = text.hidden(CASE, 30)[20 + step : 21 + step]
            for state in (grown, plain):
                drafter.commit(state, hidden, [step])
        one, other = drafter.draft([DraftRequest(s, 9, envelope) for s in (grown, plain)])
        assert torch.equal(one.tokens, other.tokens)
