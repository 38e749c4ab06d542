"""What a trace keeps of copies, against the same looked up naively."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entmtp.calibrate.copied import TextCopies, common_length, node_on_copy
from entmtp.drafters.base import GrownTree
from entmtp.drafters.copying import CopyIndex
from entmtp.growth import MAX_COPY, Copy, GrowthPlan
from growing import random_envelope

tokens = st.lists(st.integers(0, 3), max_size=30)


@given(tokens, tokens.filter(bool), st.sets(st.integers(0, 29)))
def test_copies_are_those_of_the_text_so_far(
    prompt: list[int], text: list[int], skipped: set[int]
) -> None:
    """Whether each position is asked for or some are left out."""
    copies = TextCopies(prompt, text)
    for position in range(len(text)):
        if position in skipped:
            continue
        found = copies.at(position)
        assert found == CopyIndex([*prompt, *text[: position + 1]]).find(MAX_COPY)
        if found is not None:
            assert len(found.tokens) == MAX_COPY
            ahead = text[position + 1 :]
            right = [
                size
                for size in range(MAX_COPY + 1)
                if size <= len(ahead) and list(found.tokens[:size]) == ahead[:size]
            ]
            assert copies.hits(position, found) == max(right)


@given(tokens, tokens)
def test_the_common_length_is_the_longest_prefix_of_both(one: list[int], other: list[int]) -> None:
    """Of which neither needs to end there."""
    sizes = range(min(len(one), len(other)) + 1)
    assert common_length(one, other) == max(n for n in sizes if one[:n] == other[:n])


@pytest.mark.parametrize("seed", range(40))
def test_the_node_on_a_copy_is_the_deepest_whose_path_carries_it(seed: int) -> None:
    """The root where no child does; a copy may be shorter or longer than the envelope is deep."""
    rng = random.Random(seed)
    envelope = random_envelope(rng)
    own = [rng.choice([-1, 100]) * (path[-1] + 1) for path in envelope.paths]  # siblings differ
    filled = [0, *own]
    path = envelope.path_nodes(rng.randrange(envelope.num_rows))[1:]
    copy = Copy(0, (*(filled[node] for node in path), *range(rng.randrange(5))))
    plan = GrowthPlan.whole(envelope)
    tree = GrownTree(plan, torch.tensor(filled), np.zeros(len(filled), dtype=np.uint8), [])
    carried = [
        node
        for node in range(envelope.num_rows)
        if [filled[above] for above in envelope.path_nodes(node)[1:]]
        == list(copy.tokens[: len(envelope.path_nodes(node)) - 1])
    ]
    assert node_on_copy(envelope, tree, copy) == max(carried, key=lambda n: envelope.depths[n])
