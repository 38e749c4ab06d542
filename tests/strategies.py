"""Hypothesis strategies for the values that cross the borders of the system."""

import math

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from entmtp.bank import Bank
from entmtp.params import MAX_SEED, SamplingParams
from entmtp.topology import Topology

__all__ = ["banks", "logits_rows", "sampling_params", "topologies", "utf8_texts"]


@st.composite
def topologies(
    draw: st.DrawFn, max_nodes: int = 64, max_depth: int = 6, max_rank: int = 9
) -> Topology:
    """Any legal tree: the empty one, gaps between siblings, any child expanded.

    Grown from bytes, two a node (parent, rank): one draw, so large trees are cheap to make.
    """
    num_nodes = draw(st.integers(0, max_nodes))
    source = draw(st.binary(min_size=2 * num_nodes, max_size=2 * num_nodes))
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(source[::2], source[1::2], strict=True):
        path = (*paths[parent % len(paths)], rank % (max_rank + 1))
        if len(path) <= max_depth and path not in paths:
            paths.append(path)
    return Topology.from_paths(paths[1:])


def _logits() -> SearchStrategy[float]:
    coarse = st.integers(-2, 2).map(float)  # ties
    fine = st.floats(-20.0, 20.0, width=32)
    return st.one_of(coarse, coarse, fine, st.sampled_from([-1e4, -300.0, 300.0, 1e4]))


@st.composite
def logits_rows(
    draw: st.DrawFn, num_rows: int | None = None, min_size: int = 1, max_size: int = 12
) -> Tensor:
    """float32 logits with ties and wide ranges: ``(num_rows, V)``, or ``(V,)`` for ``None``."""
    size = draw(st.integers(min_size, max_size))
    row = st.lists(_logits(), min_size=size, max_size=size)
    if num_rows is None:
        return torch.tensor(draw(row), dtype=torch.float32)
    rows = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    return torch.tensor(rows, dtype=torch.float32)


def banks(max_entries: int = 4, max_nodes: int = 12) -> SearchStrategy[Bank]:
    """Banks of small trees; each holds ``none``."""
    names = st.text("abcdefgh0123456789_", min_size=1, max_size=6).filter(lambda n: n != "none")
    trees = topologies(max_nodes=max_nodes, max_depth=4)
    return st.dictionaries(names, trees, max_size=max_entries).map(Bank.of)


def sampling_params(penalties: bool = True) -> SearchStrategy[SamplingParams]:
    """Legal parameters, greedy ones and every switched-off value included."""
    penalty = st.floats(-2.0, 2.0) if penalties else st.just(0.0)
    return st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 64),
        temperature=st.one_of(st.just(0.0), st.floats(0.01, 4.0)),
        top_k=st.integers(0, 15),
        top_p=st.one_of(st.just(1.0), st.floats(math.ulp(0.0), 1.0)),
        min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
        repetition_penalty=st.floats(0.5, 2.0) if penalties else st.just(1.0),
        presence_penalty=penalty,
        frequency_penalty=penalty,
        seed=st.one_of(st.none(), st.integers(0, MAX_SEED)),
    )


def utf8_texts(max_size: int = 20) -> SearchStrategy[str]:
    """Text whose characters take one to four bytes, the replacement character among them."""
    letters = st.sampled_from("ab \né\u0301中\ufffd😀\U0001f1e9")
    return st.text(st.one_of(letters, st.characters(codec="utf-8")), max_size=max_size)
