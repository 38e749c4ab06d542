"""The shape of draft trees: what is refused, and index arrays against naive walks."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.errors import TopologyError
from entmtp.topology import MAX_NODES, Topology, load_topology, named_topologies
from strategies import topologies

GAPS = Topology.from_paths([[1], [4], [4, 2], [4, 2, 0], [4, 5]])
"""Gaps in the ranks of siblings, and an expanded child that is not the first."""

BAD_PATHS = {
    "text": ("[[0]]", "a tree is a list of paths"),
    "bytes": (b"\0", "a tree is a list of paths"),
    "object": ({"topology": [[0]]}, "a tree is a list of paths"),
    "number": (7, "a tree is a list of paths"),
    "null": (None, "a tree is a list of paths"),
    "rank for a path": ([0], "a path is a list of ranks"),
    "text for a path": (["01"], "a path is a list of ranks"),
    "object for a path": ([{"0": 1}], "a path is a list of ranks"),
    "root": ([[0], []], "the empty path stands for the root"),
    "bool": ([[True]], r"\[True\] has a rank that is no integer"),
    "numpy bool": ([np.array([True])], "has a rank that is no integer"),
    "negative": ([[0], [0, -1]], r"\[0, -1\] has a rank that is no integer"),
    "float": ([[1.0]], r"\[1\.0\] has a rank that is no integer"),
    "text for a rank": ([["0"]], "has a rank that is no integer"),
    "null for a rank": ([[None]], "has a rank that is no integer"),
    "rank beyond 31 bits": ([[2**31]], "has a rank that is no integer from 0 to 2147483647"),
    "twice": ([[0], [3], [3]], r"the path \[3\] occurs twice"),
    "twice, tuple and list": ([[0], (0,)], r"the path \[0\] occurs twice"),
    "no prefix": ([[0], [1, 2]], r"the path \[1, 2\] lacks its prefix \[1\]"),
    "no prefix within": ([[0], [0, 1, 2]], r"\[0, 1, 2\] lacks its prefix \[0, 1\]"),
    "too many": ([[i] for i in range(MAX_NODES + 1)], "has 1025 nodes; at most 1024"),
}


def naive_ancestors(tree: Topology, node: int) -> set[int]:
    """The node, the root and every node whose path begins this node's path."""
    path = ((), *tree.paths)[node]
    return {0} | {i for i, p in enumerate(tree.paths, start=1) if p == path[: len(p)]}


@pytest.mark.parametrize("case", BAD_PATHS)
def test_what_is_no_tree_is_refused(case: str) -> None:
    """The error says which path breaks which rule."""
    paths, message = BAD_PATHS[case]
    with pytest.raises(TopologyError, match=message):
        Topology.from_paths(paths)  # type: ignore[arg-type]


def test_paths_are_sorted_by_length_then_rank() -> None:
    """A parent precedes its children, whatever the order of the list."""
    tree = Topology.from_paths([[0, 1], [10], [0], [0, 1, 0], [9], [0, 0]])
    assert tree.paths == ((0,), (9,), (10,), (0, 0), (0, 1), (0, 1, 0))


@given(topologies(), st.randoms(use_true_random=False))
def test_order_of_the_list_does_not_matter(tree: Topology, random: object) -> None:
    """Trees of the same paths are equal and hash alike."""
    shuffled = tree.to_list()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = Topology.from_paths(shuffled)
    assert again == tree
    assert hash(again) == hash(tree)


def test_any_iterables_of_integers_make_a_tree() -> None:
    """Generators and numpy integers are read; ranks become plain integers."""
    tree = Topology.from_paths(np.array([i]) for i in range(2))
    assert json.dumps(tree.to_list()) == "[[0], [1]]"


def test_counts_of_the_empty_tree() -> None:
    """Plain decoding is a tree of one row, the root."""
    tree = Topology.from_paths([])
    assert (tree.num_nodes, tree.num_rows, tree.max_depth, tree.max_rank) == (0, 1, 0, -1)
    assert tree.levels == ()
    assert tree.children == ((),)


def test_arrays_of_the_empty_tree() -> None:
    """Its arrays hold the root alone."""
    tree = Topology.from_paths([])
    arrays = (tree.parents, tree.depths, tree.ancestor_mask, tree.retrieve_indices)
    assert [array.tolist() for array in arrays] == [[-1], [0], [[True]], [[0]]]


@given(topologies())
def test_counts(tree: Topology) -> None:
    """Node budget, rows, depth and largest rank are those of the list of paths."""
    paths = tree.to_list()
    assert tree.num_nodes == len(paths) == tree.num_rows - 1
    assert tree.max_depth == max(map(len, paths), default=0)
    assert tree.max_rank == max((max(path) for path in paths), default=-1)


@given(topologies())
def test_parents_and_depths(tree: Topology) -> None:
    """The parent of a node has its path without the last rank; depth is the path's length."""
    paths = ((), *tree.paths)
    assert tree.parents.tolist() == [-1, *(paths.index(path[:-1]) for path in tree.paths)]
    assert tree.depths.tolist() == [len(path) for path in paths]


@given(topologies())
def test_children_are_the_inverse_of_parents(tree: Topology) -> None:
    """Every node is a child of its parent only, and siblings come in order of rank."""
    for node, children in enumerate(tree.children):
        assert list(children) == np.flatnonzero(tree.parents == node).tolist()
        ranks = [tree.paths[child - 1][-1] for child in children]
        assert ranks == sorted(ranks)


@given(topologies())
def test_ancestor_mask_equals_a_naive_walk(tree: Topology) -> None:
    """A row sees itself, the root and the prefixes of its path, nothing else."""
    for node, row in enumerate(tree.ancestor_mask):
        assert set(np.flatnonzero(row).tolist()) == naive_ancestors(tree, node)


@given(topologies())
def test_path_nodes_are_the_ancestors_in_order(tree: Topology) -> None:
    """The path of a node runs from the root down to it."""
    for node in range(tree.num_rows):
        assert tree.path_nodes(node) == sorted(naive_ancestors(tree, node))


@given(topologies())
def test_retrieve_indices_are_the_paths_to_the_leaves(tree: Topology) -> None:
    """One row a leaf, padded with -1, which is no node."""
    leaves = [node for node in range(tree.num_rows) if not tree.children[node]]
    assert tree.retrieve_indices.shape == (len(leaves), tree.max_depth + 1)
    for leaf, row in zip(leaves, tree.retrieve_indices.tolist(), strict=True):
        path = tree.path_nodes(leaf)
        assert row == path + [-1] * (tree.max_depth + 1 - len(path))


def test_levels_of_a_tree_with_gaps() -> None:
    """A level evaluates only parents with children and asks for candidates up to the last gap."""
    first, second, third = GAPS.levels
    assert (first.parents.tolist(), first.paths.tolist(), first.width) == ([0], [[0]], 5)
    assert (second.parents.tolist(), second.paths.tolist(), second.width) == ([2], [[0, 2]], 6)
    assert (third.parents.tolist(), third.paths.tolist(), third.width) == ([3], [[0, 2, 3]], 1)
    assert [level.ranks.tolist() for level in GAPS.levels] == [[1, 4], [2, 5], [0]]
    assert [level.children.tolist() for level in GAPS.levels] == [[1, 2], [3, 4], [5]]


@given(topologies(), st.integers(0, 10**6))
def test_a_level_can_be_cut_to_some_of_its_parents(tree: Topology, seed: int) -> None:
    """What is left of them is what they had; of all parents it is the level itself."""
    rng = random.Random(seed)
    for level in tree.levels:
        parents = level.parents.tolist()
        kept = sorted(rng.sample(parents, rng.randint(1, len(parents))))
        part = level.restrict(kept)
        assert part.parents.tolist() == kept
        assert part.paths.tolist() == [tree.path_nodes(node) for node in kept]
        assert part.children.tolist() == sorted(c for node in kept for c in tree.children[node])
        assert part.parents[part.parent_rows].tolist() == tree.parents[part.children].tolist()
        assert part.ranks.tolist() == [tree.paths[c - 1][-1] for c in part.children.tolist()]
        assert part.width == max(part.ranks.tolist()) + 1
        assert level.restrict(parents) is level


@given(topologies())
def test_levels_rebuild_the_tree(tree: Topology) -> None:
    """Parent rows and ranks of all levels give back exactly the paths, in node order."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for level in tree.levels:
        for child, row, rank in zip(level.children, level.parent_rows, level.ranks, strict=True):
            paths[int(child)] = (*paths[int(level.parents[row])], int(rank))
        assert level.width == level.ranks.max() + 1
    assert tuple(paths.values()) == ((), *tree.paths)


@given(topologies())
def test_level_paths_lead_from_the_root_to_each_parent(tree: Topology) -> None:
    """A drafter finds the tokens above a row by this table."""
    for depth, level in enumerate(tree.levels, start=1):
        assert level.paths.shape == (len(level.parents), depth)
        assert level.paths.tolist() == [tree.path_nodes(int(node)) for node in level.parents]


@given(topologies(), st.integers(-1, 7))
def test_truncate_keeps_the_nodes_above(tree: Topology, depth: int) -> None:
    """A cut tree has every node down to the depth, and their order."""
    cut = tree.truncate(depth)
    assert cut.paths == tuple(path for path in tree.paths if len(path) <= depth)
    assert (cut is tree) == (depth >= tree.max_depth)


def test_cutting_twice_gives_the_same_object() -> None:
    """Arrays of a cut tree are made once, not at every step."""
    assert GAPS.truncate(2) is GAPS.truncate(2)


@given(topologies())
def test_list_form_round_trips(tree: Topology) -> None:
    """The list goes through JSON and back to the same tree and digest."""
    again = Topology.from_paths(json.loads(json.dumps(tree.to_list())))
    assert again == tree
    assert again.digest == tree.digest


def test_digests_tell_trees_apart() -> None:
    """Another set of paths has another digest."""
    trees = [*named_topologies().values(), GAPS]
    assert len({tree.digest for tree in trees}) == len(trees)


@pytest.mark.parametrize(
    ("name", "nodes_per_depth"),
    [
        ("none", []),
        ("chain4", [1, 1, 1, 1]),
        ("tree8", [3, 3, 1, 1]),
        ("tree16", [4, 7, 4, 1]),
        ("envelope24", [6, 8, 6, 4]),
        ("mc_sim_7b_63", [10, 28, 23, 2]),
    ],
)
def test_shipped_trees(name: str, nodes_per_depth: list[int]) -> None:
    """Each has the stated number of nodes at every depth."""
    tree = named_topologies()[name]
    assert np.bincount(tree.depths).tolist() == [1, *nodes_per_depth]


def test_published_tree_is_the_published_one() -> None:
    """Digest, mask, leaves and drafted rows are those of Medusa's mc_sim_7b_63."""
    tree = named_topologies()["mc_sim_7b_63"]
    assert tree.digest == "7e63acaa76293e94"
    assert tree.ancestor_mask.sum() == 207
    assert tree.retrieve_indices.shape == (42, 5)
    assert [len(level.parents) for level in tree.levels] == [1, 10, 10, 1]


def test_shipped_trees_cannot_be_changed_through_the_answer() -> None:
    """A caller gets a dictionary of its own."""
    named_topologies().clear()
    assert load_topology("chain4").num_nodes == 4


def test_chain_of_the_largest_budget() -> None:
    """The arrays of the deepest tree that is accepted are right."""
    tree = Topology.from_paths([(0,) * depth for depth in range(1, MAX_NODES + 1)])
    assert tree.max_depth == len(tree.levels) == MAX_NODES
    assert np.array_equal(tree.ancestor_mask, np.tri(MAX_NODES + 1, dtype=bool))
    assert tree.retrieve_indices.tolist() == [list(range(MAX_NODES + 1))]


def test_star_of_the_largest_budget() -> None:
    """The arrays of the widest tree that is accepted are right."""
    tree = Topology.from_paths([rank] for rank in range(MAX_NODES))
    assert [level.width for level in tree.levels] == [MAX_NODES]
    assert tree.ancestor_mask.sum() == 2 * MAX_NODES + 1
    assert tree.retrieve_indices.shape == (MAX_NODES, 2)


def test_a_file_of_paths_is_loaded(tmp_path: Path) -> None:
    """A JSON list in a file is the tree, in any order."""
    file = tmp_path / "tree.json"
    file.write_text("[[4, 2], [4], [1]]")
    assert load_topology(str(file)).paths == ((1,), (4,), (4, 2))


@pytest.mark.parametrize("name", ["chain5", "", ".", "no/such/file.json", "[[0]]" + " " * 5000])
def test_neither_name_nor_file(name: str) -> None:
    """The error lists the trees that exist, even where the name is too long for a file."""
    with pytest.raises(TopologyError, match=r"neither a file nor one of the shipped trees.*chain4"):
        load_topology(name)


@pytest.mark.parametrize(
    "content",
    [b"", b"[[0],", b"\xff\xfe", b"[" * 100_000, b"[[" + b"1" * 5000 + b"]]"],
    ids=["empty", "cut off", "not UTF-8", "too deep", "too many digits"],
)
def test_a_file_that_is_not_json(content: bytes, tmp_path: Path) -> None:
    """The error names the file."""
    file = tmp_path / "tree.json"
    file.write_bytes(content)
    with pytest.raises(TopologyError, match=r"tree\.json: not a JSON list of paths"):
        load_topology(str(file))


def test_a_file_that_holds_no_tree(tmp_path: Path) -> None:
    """The error names the file and the broken rule."""
    file = tmp_path / "tree.json"
    file.write_text("[[0, 1]]")
    with pytest.raises(TopologyError, match=r"tree\.json: the path \[0, 1\] lacks its prefix"):
        load_topology(str(file))
