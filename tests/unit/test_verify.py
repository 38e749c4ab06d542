"""Which draft tokens are kept: exact verification against brute force, typical by hand."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entmtp.params import TypicalParams
from entmtp.topology import Topology
from entmtp.verify import VerifyResult, verify_exact, verify_typical
from strategies import topologies

V = 11
TREE = Topology.from_paths([[0], [1], [0, 0]])
GAPS = Topology.from_paths([[1], [4], [4, 2]])


def exact(topology: Topology, drafted: Sequence[int], targets: Sequence[int]) -> VerifyResult:
    """Verify against a table of the target's token after every node."""
    return verify_exact(topology, drafted, lambda node, _: targets[node])


def rows(*probs: Sequence[float]) -> torch.Tensor:
    """Logits whose softmax is these probabilities."""
    return torch.tensor(probs).log()


@st.composite
def drafted_trees(draw: st.DrawFn) -> tuple[Topology, list[int], list[int]]:
    """A tree, distinct tokens of siblings, and a target that often agrees with some child."""
    tree = draw(topologies(max_depth=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shift = rng.integers(V, size=tree.num_rows).tolist()
    drafted = [0]
    for node, path in enumerate(tree.paths, start=1):
        drafted.append((shift[int(tree.parents[node])] + path[-1]) % V)
    children = [[drafted[child] for child in nodes] for nodes in tree.children]
    targets = [int(rng.choice([*tokens, rng.integers(V)])) for tokens in children]
    return tree, drafted, targets


@given(drafted_trees())
def test_exact_equals_brute_force_over_all_paths(
    case: tuple[Topology, list[int], list[int]],
) -> None:
    """The longest path on which every token is the target's own is kept."""
    tree, drafted, targets = case
    paths = [tree.path_nodes(node) for node in range(tree.num_rows)]
    right = [p for p in paths if all(drafted[b] == targets[a] for a, b in pairwise(p))]
    best = max(right, key=len)
    tokens = (*(drafted[node] for node in best[1:]), targets[best[-1]])
    assert exact(tree, drafted, targets) == VerifyResult(tuple(best), tokens)


@given(topologies(max_rank=4), st.integers(0, 2**32))
def test_exact_emits_the_targets_own_tokens(tree: Topology, seed: int) -> None:
    """Whatever is drafted, equal siblings included, each emitted token is the target's."""
    drafted, targets = np.random.default_rng(seed).integers(3, size=(2, tree.num_rows)).tolist()
    result = exact(tree, drafted, targets)
    assert result.tokens == tuple(targets[node] for node in result.nodes)
    assert list(result.nodes) == tree.path_nodes(result.nodes[-1])


@given(drafted_trees())
def test_the_target_is_asked_once_a_visited_node(
    case: tuple[Topology, list[int], list[int]],
) -> None:
    """It is told the tokens accepted below the root so far, for penalties and positions."""
    tree, drafted, targets = case
    asked: list[tuple[int, tuple[int, ...]]] = []

    def target(node: int, emitted: Sequence[int]) -> int:
        asked.append((node, tuple(emitted)))
        return targets[node]

    result = verify_exact(tree, drafted, target)
    assert asked == [(node, result.tokens[:i]) for i, node in enumerate(result.nodes)]


@pytest.mark.parametrize(
    ("targets", "nodes", "tokens"),
    [
        ([0, 0, 0, 0], (0,), (0,)),  # after the root
        ([6, 9, 0, 9], (0, 2), (6, 0)),  # after a leaf that ends above the deepest one
        ([5, 7, 9, 0], (0, 1, 3), (5, 7, 0)),  # after the deepest leaf
    ],
)
def test_token_zero_is_no_padding(
    targets: list[int], nodes: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    """A next token of id 0 accepts nothing that is not a node (published code accepts padding)."""
    assert exact(TREE, [3, 5, 6, 7], targets) == VerifyResult(nodes, tokens)


def test_exact_on_the_empty_tree_emits_the_bonus_token() -> None:
    """Plain decoding is the step that drafts nothing."""
    assert exact(Topology(()), [3], [8]) == VerifyResult((0,), (8,))


def test_exact_walks_a_tree_with_gaps() -> None:
    """A node is found by its place in the tree, not by its rank."""
    assert exact(GAPS, [0, 1, 2, 3], [2, 9, 3, 4]) == VerifyResult((0, 2, 3), (2, 3, 4))


@pytest.mark.parametrize(
    ("probs", "token", "is_kept"),
    [
        # H = 1.142, 0.3 exp(-H) = 0.0957, so the floor is epsilon = 0.09
        ([0.5, 0.3, 0.11, 0.09], 2, True),
        ([0.5, 0.3, 0.15, 0.05], 3, False),
        # sharp: H = 0.325, 0.3 exp(-H) = 0.217, the floor is 0.09
        ([0.92, 0.05, 0.02, 0.01], 1, False),
        # flat over 4: H = ln 4, the floor is 0.3 / 4 = 0.075
        ([0.25, 0.25, 0.25, 0.25], 3, True),
        # H = 1.296, 0.3 exp(-H) = 0.0821, below epsilon
        ([0.305, 0.305, 0.305, 0.085], 3, True),
        # H = 1.275, 0.3 exp(-H) = 0.0838
        ([0.31, 0.31, 0.31, 0.07], 3, False),
    ],
)
def test_typical_golden_values(probs: list[float], token: int, is_kept: bool) -> None:
    """p > min(0.09, 0.3 exp(-H)) decides, worked out by hand."""
    chain = Topology.from_paths([[0]])
    result = verify_typical(chain, [0, token], rows(probs, probs), 1.0, TypicalParams())
    assert result.nodes == ((0, 1) if is_kept else (0,))


def test_typical_at_the_floor_is_not_kept() -> None:
    """The comparison is strict: a certain token does not pass a floor of 1."""
    chain = Topology.from_paths([[0]])
    certain = torch.tensor([[0.0, -math.inf]]).repeat(2, 1)
    params = TypicalParams(posterior_threshold=1.0, posterior_alpha=5.0)
    assert verify_typical(chain, [0, 0], certain, 1.0, params).nodes == (0,)


def test_typical_bonus_is_the_argmax_after_the_last_kept_node() -> None:
    """The step ends with one token of the target, and ties go to the lower id."""
    logits = rows([0.1, 0.9, 0.0], [0.2, 0.4, 0.4])
    result = verify_typical(Topology.from_paths([[0]]), [0, 1], logits, 1.0, TypicalParams())
    assert result == VerifyResult((0, 1), (1, 1))


def test_typical_keeps_the_longest_path() -> None:
    """A deeper path wins over a more probable short one."""
    logits = rows([0.7, 0.3], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    tree = Topology.from_paths([[0], [1], [1, 0]])
    assert verify_typical(tree, [0, 0, 1, 0], logits, 1.0, TypicalParams()).nodes == (0, 2, 3)


def test_typical_prefers_the_more_probable_of_equally_long_paths() -> None:
    """The sum of log-probabilities decides, not the order."""
    logits = rows([0.3, 0.7], [0.5, 0.5], [0.5, 0.5])
    tree = Topology.from_paths([[0], [1]])
    assert verify_typical(tree, [0, 0, 1], logits, 1.0, TypicalParams()).nodes == (0, 2)


def test_typical_ties_go_to_the_first_path() -> None:
    """Equally long and equally probable paths are taken in node order."""
    logits = rows([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    tree = Topology.from_paths([[0], [1]])
    assert verify_typical(tree, [0, 1, 0], logits, 1.0, TypicalParams()).nodes == (0, 1)


def test_typical_needs_the_whole_path() -> None:
    """A typical token below one that is not typical is dropped."""
    logits = rows([0.99, 0.01], [0.5, 0.5], [0.5, 0.5])
    tree = Topology.from_paths([[0], [0, 0]])
    assert verify_typical(tree, [0, 1, 0], logits, 1.0, TypicalParams()).nodes == (0,)


@pytest.mark.parametrize(("temperature", "is_kept"), [(0.0, True), (1.0, True), (0.5, False)])
def test_typical_temperature(temperature: float, is_kept: bool) -> None:
    """A low temperature sharpens the distribution; 0 is read as 1."""
    logits = rows([0.8, 0.2], [0.5, 0.5])
    chain = Topology.from_paths([[0]])
    result = verify_typical(chain, [0, 1], logits, temperature, TypicalParams())
    assert (result.nodes == (0, 1)) == is_kept


@given(topologies(max_nodes=12, max_depth=4), st.integers(0, 2**32))
def test_typical_equals_brute_force(tree: Topology, seed: int) -> None:
    """The kept path is the longest, then most probable one whose every token is typical."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(tree.num_rows, 3))).float()
    drafted = rng.integers(3, size=tree.num_rows).tolist()
    probs = torch.softmax(logits.double(), dim=-1)
    entropy = -(probs * probs.log()).sum(dim=-1)
    floor = (0.3 * (-entropy).exp()).clamp(max=0.09)
    score = {(0,): 0.0}
    for node in range(1, tree.num_rows):
        path, parent = tuple(tree.path_nodes(node)), int(tree.parents[node])
        p = float(probs[parent, drafted[node]])
        if path[:-1] in score and p > floor[parent]:
            score[path] = score[path[:-1]] + math.log(p)
    result = verify_typical(tree, drafted, logits, 1.0, TypicalParams())
    assert result.nodes in score
    best = max((len(path), value) for path, value in score.items())
    assert (len(result.nodes), score[result.nodes]) == pytest.approx(best, abs=1e-5)
