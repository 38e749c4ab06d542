"""The shape of a draft tree: paths of child ranks and the index arrays made from them once.

A path is a tuple of ranks. Rank r at depth d means "the r-th best token (0-based) of the head for
depth d, given the tokens above". Node 0 is the root; nodes 1..n are the paths in the order
(length, then lexicographic), so a parent always precedes its children and one depth is contiguous.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt

from entmtp.errors import TopologyError

__all__ = ["MAX_NODES", "Level", "Path", "Topology", "load_topology", "named_topologies"]

Path = tuple[int, ...]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_NODES = 1024
"""Largest node budget that is accepted; published trees have at most 64."""

_MAX_RANK = 2**31 - 1  # far above what a drafter can fill, and fits into every index array


@dataclass(frozen=True)
class Level:
    """What a drafter evaluates to fill one depth of a tree.

    Attributes:
        parents: ``(R,)`` nodes of the depth above that have children: the rows to evaluate.
        paths: ``(R, depth)`` nodes from the root to each parent, both included.
        children: ``(C,)`` nodes of this depth.
        parent_rows: ``(C,)`` index into ``parents`` for each child.
        ranks: ``(C,)`` child rank of each child; gaps are legal.
        width: largest rank plus one: how many candidates each row must yield.
    """

    parents: IntArray
    paths: IntArray
    children: IntArray
    parent_rows: IntArray
    ranks: IntArray
    width: int

    def restrict(self, parents: Sequence[int]) -> "Level":
        """The level of some of its parents alone, at least one; itself where those are all.

        Args:
            parents: some of them, in order.
        """
        if len(parents) == len(self.parents):
            return self
        is_kept = np.isin(self.parents, parents)
        is_child = is_kept[self.parent_rows]
        row_of = np.cumsum(is_kept) - 1
        ranks = self.ranks[is_child]
        return Level(
            self.parents[is_kept],
            self.paths[is_kept],
            self.children[is_child],
            row_of[self.parent_rows[is_child]],
            ranks,
            int(ranks.max()) + 1,
        )


@dataclass(frozen=True)
class Topology:
    """An immutable, prefix-closed set of rank paths; the empty set is plain decoding.

    Build it with :meth:`from_paths`, which sorts and validates. Equality and hash are those of
    the set of paths.
    """

    paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Iterable[int]]) -> "Topology":
        """Validate a list of paths, the published ``medusa_choices`` form included.

        Args:
            paths: any order; ``[]`` gives the empty tree.

        Raises:
            TopologyError: an entry is no list of ranks >= 0, occurs twice, lacks its prefix, is
                empty (the root is implicit), or there are more than ``MAX_NODES``.
        """
        checked = [_check_path(path) for path in _as_list(paths)]
        if len(checked) > MAX_NODES:
            raise TopologyError(
                f"the tree has {len(checked)} nodes; at most {MAX_NODES} are allowed"
            )
        unique = set(checked)
        if len(unique) != len(checked):
            twice = next(path for path in checked if checked.count(path) > 1)
            raise TopologyError(f"the path {list(twice)} occurs twice; list each path once")
        for path in sorted(checked, key=_order):
            if len(path) > 1 and path[:-1] not in unique:
                raise TopologyError(
                    f"the path {list(path)} lacks its prefix {list(path[:-1])}; a tree must "
                    "contain every prefix of its paths"
                )
        return cls(tuple(sorted(checked, key=_order)))

    @classmethod
    def chain(cls, length: int) -> "Topology":
        """Best children alone, so many; none is the empty tree."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    def to_list(self) -> list[list[int]]:
        """The published list form, sorted by (length, lexicographic)."""
        return [list(path) for path in self.paths]

    @property
    def num_nodes(self) -> int:
        """Node budget: draft nodes, root excluded."""
        return len(self.paths)

    @property
    def num_rows(self) -> int:
        """Rows of the target forward: draft nodes and the root."""
        return len(self.paths) + 1

    @cached_property
    def max_depth(self) -> int:
        """Length of the longest path; 0 for the empty tree."""
        return len(self.paths[-1]) if self.paths else 0

    @cached_property
    def max_rank(self) -> int:
        """Largest child rank anywhere; -1 for the empty tree."""
        return max((rank for path in self.paths for rank in path), default=-1)

    @cached_property
    def parents(self) -> IntArray:
        """``(N,)`` parent of every node; -1 for the root."""
        index = {path: node for node, path in enumerate(self.paths, start=1)}
        index[()] = 0
        return np.array([-1, *(index[path[:-1]] for path in self.paths)], dtype=np.int64)

    @cached_property
    def depths(self) -> IntArray:
        """``(N,)`` depth of every node; 0 for the root. Position = root position + depth."""
        return np.array([0, *(len(path) for path in self.paths)], dtype=np.int64)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For every node, its children in order of rank."""
        lists: list[list[int]] = [[] for _ in range(self.num_rows)]
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                lists[parent].append(node)
        return tuple(tuple(nodes) for nodes in lists)

    @cached_property
    def ancestor_mask(self) -> BoolArray:
        """``(N, N)``; entry ``[i, j]`` is true where j is i or an ancestor of i."""
        mask = np.eye(self.num_rows, dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """One :class:`Level` per depth, the first for depth 1."""
        return tuple(self._level(depth) for depth in range(1, self.max_depth + 1))

    @cached_property
    def retrieve_indices(self) -> IntArray:
        """``(leaves, max_depth + 1)`` nodes of every root-to-leaf path, padded with -1."""
        rows = []
        for leaf in (node for node in range(self.num_rows) if not self.children[node]):
            row = self.path_nodes(leaf)
            rows.append(row + [-1] * (self.max_depth + 1 - len(row)))
        return np.array(rows, dtype=np.int64)

    def path_nodes(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        row = [node]
        while (parent := int(self.parents[row[-1]])) >= 0:
            row.append(parent)
        return row[::-1]

    def truncate(self, max_depth: int) -> "Topology":
        """The nodes of depth <= ``max_depth``; the same object where that is all of them."""
        return self if max_depth >= self.max_depth else _truncate(self, max(max_depth, 0))

    def prepare(self) -> None:
        """Make the index arrays that steps read, so that none is made in the middle of a text."""
        _ = self.max_rank, self.depths, self.children, self.ancestor_mask, self.levels

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the sorted paths as compact JSON."""
        text = json.dumps(self.to_list(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _level(self, depth: int) -> Level:
        children = np.flatnonzero(self.depths == depth)
        parents, parent_rows = np.unique(self.parents[children], return_inverse=True)
        ranks = np.array([self.paths[node - 1][-1] for node in children.tolist()], dtype=np.int64)
        paths = np.array([self.path_nodes(node) for node in parents.tolist()], dtype=np.int64)
        width = int(ranks.max()) + 1
        return Level(parents, paths, children, parent_rows.reshape(-1), ranks, width)


def named_topologies() -> dict[str, Topology]:
    """The trees that ship.

    ``none``, ``chain4``, ``tree8``, ``tree16``, ``envelope24`` and ``mc_sim_7b_63``.
    """
    return dict(_shipped())


def load_topology(name_or_file: str) -> Topology:
    """A shipped tree by name, or a JSON file that holds a list of paths.

    Raises:
        TopologyError: neither a known name nor a readable file, or not a tree.
    """
    if name_or_file in _shipped():
        return _shipped()[name_or_file]
    file = FilePath(name_or_file)
    try:
        is_file = file.is_file()
    except OSError:  # a text that is too long for a file name
        is_file = False
    if not is_file:
        known = ", ".join(_shipped())
        raise TopologyError(
            f"no topology {name_or_file!r}: neither a file nor one of the shipped trees ({known})"
        )
    try:
        return Topology.from_paths(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise TopologyError(f"{file}: not a JSON list of paths ({error})") from error
    except TopologyError as error:
        raise TopologyError(f"{file}: {error}") from error


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


def _as_list(paths: object) -> Sequence[object]:
    if isinstance(paths, str | bytes | dict) or not isinstance(paths, Iterable):
        raise TopologyError(
            f"a tree is a list of paths such as [[0], [1], [0, 0]], not {paths!r:.80}"
        )
    return list(paths)


def _check_path(path: object) -> Path:
    if isinstance(path, str | bytes | dict) or not isinstance(path, Iterable):
        raise TopologyError(f"a path is a list of ranks such as [0, 1], not {path!r:.80}")
    ranks = tuple(path)
    if not ranks:
        raise TopologyError("the empty path stands for the root, which is implicit; leave it out")
    for rank in ranks:
        is_integer = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
        if not is_integer or not 0 <= rank <= _MAX_RANK:
            raise TopologyError(
                f"the path {list(ranks)!r:.80} has a rank that is no integer from 0 to {_MAX_RANK}"
            )
    return tuple(int(rank) for rank in ranks)


@lru_cache(maxsize=1024)
def _truncate(topology: Topology, max_depth: int) -> Topology:
    return Topology(tuple(path for path in topology.paths if len(path) <= max_depth))


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Topology]:
    text = resources.files("entmtp").joinpath("data/topologies.json").read_text(encoding="utf-8")
    lists = json.loads(text)["topologies"]
    return {name: Topology.from_paths(paths) for name, paths in lists.items()}
