"""Drafters: every node holds the token that the published formulas give on its path alone."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entmtp.drafters.base import Coupling, DraftRequest, DraftTree, check_depth
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.heads import HeadsConfig, HydraHeads, MedusaHeads, build_heads
from entmtp.drafters.picking import BestChildren, ScoredRows
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.drafters.tree_heads import HeadsDrafter
from entmtp.errors import TopologyError
from entmtp.noise import NoiseSource
from entmtp.sampling import gumbel_noise
from entmtp.topology import Topology, named_topologies
from strategies import topologies

SIZE, VOCAB, HOT, HEADS = 12, 30, 17, 4

trees = topologies(max_nodes=40, max_depth=HEADS, max_rank=HOT - 1)
kinds = st.sampled_from(["medusa", "hydra"])


def random_drafter(
    kind: str, seed: int = 0, num_layers: int = 2, has_own_output: bool = False
) -> HeadsDrafter:
    """Heads in float64 with random weights over a subset of the vocabulary in random order."""
    generator = torch.Generator().manual_seed(seed)
    hot_ids = torch.randperm(VOCAB, generator=generator)[:HOT]
    config = HeadsConfig(kind, SIZE, VOCAB, HEADS, num_layers, 1.7, has_own_output)
    heads = build_heads(config, hot_ids).double()
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    if not has_own_output:
        heads.attach_output(torch.randn(HOT, SIZE, generator=generator).double())
    return HeadsDrafter(heads, torch.randn(VOCAB, SIZE, generator=generator).double())


def random_hidden(seed: int, num_rows: int = 1) -> Tensor:
    """Hidden states of the target, float64."""
    return torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(seed)).double()


def start(drafter: HeadsDrafter, hidden: Tensor, root: int, plan: Topology) -> DraftRequest:
    """The request of a sequence whose prompt ended with ``hidden``."""
    return DraftRequest(drafter.prefill([0] * len(hidden), hidden, root), root, plan)


# -- the slow twin of the heads: the formulas, one node at a time, from the raw tensors ------------


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def affine(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """W x + b, row by row."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return torch.stack([(row * x).sum() for row in weight]) + bias


def ranking(drafter: HeadsDrafter, hidden: Tensor, tokens: Sequence[int]) -> list[int]:
    """Hot tokens, best first, after ``tokens``: the root and the draft tokens of one path.

    Medusa: z = h; z <- z + SiLU(W z + b) for each layer. Hydra: u = [h, E(root), E(x_1), ...];
    z = R u + c + SiLU(W u + b), then the other layers as in Medusa. Scores: O z (+ bias).
    """
    tensors, config = drafter.heads.state_dict(), drafter.heads.config
    head, num_blocks = len(tokens) - 1, config.num_layers
    z = hidden
    if config.kind == "hydra":
        embedding = drafter._embedding
        u = torch.cat([hidden, *(embedding[t] * config.embed_scale for t in tokens)])
        z = affine(tensors, f"first.{head}.residual", u)
        z = z + silu(affine(tensors, f"first.{head}.linear", u))
        num_blocks -= 1
    for block in range(num_blocks):
        z = z + silu(affine(tensors, f"blocks.{head}.{block}.linear", z))
    if config.has_own_output:
        scores = affine(tensors, f"outputs.{head}", z).tolist()
    else:
        scores = [float((row * z).sum()) for row in drafter.heads.shared_output]
    order = sorted(range(HOT), key=lambda index: (-scores[index], index))
    return [int(tensors["hot_ids"][index]) for index in order]


def brute_force(drafter: HeadsDrafter, hidden: Tensor, root: int, plan: Topology) -> list[int]:
    """Tokens of a tree, each from its own path and from nothing else."""

    def token(path: Sequence[int]) -> int:
        above = [root, *(token(path[:depth]) for depth in range(1, len(path)))]
        return ranking(drafter, hidden, above)[path[-1]]

    return [root, *(token(path) for path in plan.paths)]


# -- heads -----------------------------------------------------------------------------------------


@given(kinds, st.integers(1, 3), st.booleans(), topologies(24, HEADS, HOT - 1), st.integers(0, 99))
@settings(max_examples=60)
def test_each_node_is_the_heads_choice_on_its_path_alone(
    kind: str, num_layers: int, has_own_output: bool, plan: Topology, seed: int
) -> None:
    """Whatever the tree, a node's token is the head's rank-th token given the path above it."""
    drafter = random_drafter(kind, seed, num_layers, has_own_output)
    hidden, root = random_hidden(seed), seed % VOCAB
    (tree,) = drafter.draft([start(drafter, hidden, root, plan)])
    assert tree.topology == plan
    assert tree.tokens.tolist() == brute_force(drafter, hidden[0], root, plan)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize(
    "paths",
    [
        [(0,), (1,), (1, 0)],
        [(0,), (2,), (2, 0), (2, 0, 3)],
        [(0,), (0, 1)],
        [(5,), (5, 4), (5, 4, 3), (5, 4, 3, 2)],
        named_topologies()["mc_sim_7b_63"].truncate(2).paths,
    ],
    ids=["late-expansion", "gap-at-the-top", "gap-below", "chain-of-late-children", "published"],
)
def test_trees_that_published_code_fills_wrongly(kind: str, paths: list[list[int]]) -> None:
    """Gaps in ranks, and expanded children that are not the first, are filled rightly."""
    plan, hidden = Topology.from_paths(paths), random_hidden(3)
    drafter = random_drafter(kind, 3)
    (tree,) = drafter.draft([start(drafter, hidden, 4, plan)])
    assert tree.tokens.tolist() == brute_force(drafter, hidden[0], 4, plan)


def test_equal_scores_are_ranked_by_hot_index() -> None:
    """Where scores tie, the token that comes first in the hot vocabulary has the better rank."""
    drafter = random_drafter("medusa", has_own_output=True)
    with torch.no_grad():
        drafter.heads.outputs[0].weight.zero_()
        drafter.heads.outputs[0].bias.copy_(torch.arange(HOT) % 3)
    plan = Topology.from_paths([(rank,) for rank in range(HOT)])
    (tree,) = drafter.draft([start(drafter, random_hidden(0), 4, plan)])
    order = sorted(range(HOT), key=lambda index: (-(index % 3), index))
    assert tree.tokens[1:].tolist() == drafter.heads.hot_ids[order].tolist()


@given(kinds, st.lists(trees, min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=40)
def test_a_batch_fills_each_tree_as_alone(kind: str, plans: list[Topology], seed: int) -> None:
    """Requests with different plans, roots and states do not touch each other."""
    drafter = random_drafter(kind, seed)
    requests = [
        start(drafter, random_hidden(seed + i), (seed + i) % VOCAB, plan)
        for i, plan in enumerate(plans)
    ]
    alone = [drafter.draft([request])[0].tokens.tolist() for request in requests]
    assert [tree.tokens.tolist() for tree in drafter.draft(requests)] == alone


class CountingMedusa(MedusaHeads):
    """Notes which heads are run, and on how many rows."""

    def features(self, head: int, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        self.calls = [*getattr(self, "calls", []), (head, len(hidden))]
        return super().features(head, hidden, embedded)


class CountingHydra(HydraHeads):
    """Notes which heads are run, and on how many rows."""

    def features(self, head: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        self.calls = [*getattr(self, "calls", []), (head, len(hidden))]
        return super().features(head, hidden, embedded)


def calls_for(kind: str, plans: list[Topology]) -> list[tuple[int, int]]:
    """(head, rows) of every head evaluation that one batch of drafts makes."""
    heads = (CountingHydra if kind == "hydra" else CountingMedusa)(
        HeadsConfig(kind, SIZE, VOCAB, HEADS), torch.arange(HOT)
    )
    heads.attach_output(torch.ones(HOT, SIZE))
    drafter = HeadsDrafter(heads, torch.ones(VOCAB, SIZE))
    drafter.draft([start(drafter, torch.ones(1, SIZE), 1, plan) for plan in plans])
    return getattr(heads, "calls", [])


def test_heads_deeper_than_the_deepest_plan_are_not_run() -> None:
    """A batch of plans of depth 2 runs two heads once each, and shallow plans only the first."""
    shallow, deeper = Topology.from_paths([(0,)]), Topology.from_paths([(0,), (1,), (1, 0)])
    assert calls_for("medusa", [shallow, deeper, Topology(())]) == [(0, 2), (1, 1)]


def test_a_batch_of_empty_plans_runs_no_head() -> None:
    """Plain decoding costs no head pass."""
    assert calls_for("hydra", [Topology(()), Topology(())]) == []


def test_hydra_evaluates_a_row_for_each_node_with_children() -> None:
    """The published tree needs 1, 10, 10 and 1 rows."""
    published = named_topologies()["mc_sim_7b_63"]
    assert calls_for("hydra", [published]) == [(0, 1), (1, 10), (2, 10), (3, 1)]


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_the_state_after_a_step_is_the_last_accepted_row(kind: str) -> None:
    """A commit of several rows leaves the state of a prefill that ends with the last of them."""
    drafter, plan = random_drafter(kind), Topology.from_paths([(0,), (1,), (1, 2)])
    accepted = random_hidden(9, num_rows=3)
    state = drafter.prefill([1, 2], random_hidden(8, num_rows=2), 3)
    drafter.commit(state, accepted, [4, 5, 6])
    (tree,) = drafter.draft([DraftRequest(state, 6, plan)])
    assert tree.tokens.tolist() == brute_force(drafter, accepted[-1], 6, plan)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_the_state_does_not_alias_the_targets_buffer(kind: str) -> None:
    """A target may reuse the memory of its hidden states after the call."""
    drafter, plan = random_drafter(kind), Topology.from_paths([(0,), (1,), (1, 2)])
    prompt, step = random_hidden(8), random_hidden(9)
    state = drafter.prefill([1], prompt, 3)
    drafter.commit(state, step, [4])
    expected = drafter.draft([DraftRequest(state, 4, plan)])[0].tokens.tolist()
    prompt.zero_()
    step.zero_()
    assert drafter.draft([DraftRequest(state, 4, plan)])[0].tokens.tolist() == expected


# -- prompt lookup ---------------------------------------------------------------------------------


def continuations(text: list[int], above: list[int], lengths: range) -> list[int]:
    """Distinct tokens that followed the end of ``text + above`` in ``text``, by a scan of it all.

    The longest n-gram first, then the most recent of its last 64 occurrences.
    """
    found: list[int] = []
    whole = text + above
    for n in reversed(lengths):
        gram = whole[-n:]
        followers = [text[i] for i in range(n, len(text)) if text[i - n : i] == gram]
        found += [token for token in reversed(followers[-64:]) if n <= len(whole)]
    return list(dict.fromkeys(found))


def lookup_twin(text: list[int], plan: Topology, lengths: range) -> dict[tuple[int, ...], int]:
    """Path -> token of each node that can be filled."""
    filled: dict[tuple[int, ...], int] = {}
    for path in plan.paths:
        if len(path) > 1 and path[:-1] not in filled:
            continue
        above = [filled[path[:depth]] for depth in range(1, len(path))]
        found = continuations(text, above, lengths)
        if path[-1] < len(found):
            filled[path] = found[path[-1]]
    return filled


def as_mapping(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """Path -> token, root apart."""
    return dict(zip(tree.topology.paths, tree.tokens.tolist()[1:], strict=True))


@given(
    text=st.integers(1, 3).flatmap(lambda top: st.lists(st.integers(0, top), min_size=2)),
    cuts=st.lists(st.integers(1, 5), max_size=8),
    plan=topologies(max_nodes=24, max_depth=5, max_rank=3),
    lengths=st.sampled_from([range(1, 2), range(1, 5), range(2, 5), range(3, 4)]),
)
@settings(max_examples=200)
def test_lookup_equals_a_scan_of_the_whole_text(
    text: list[int], cuts: list[int], plan: Topology, lengths: range
) -> None:
    """However the text came in steps, the draft is what a scan of all of it finds."""
    drafter = PromptLookupDrafter(max_ngram=lengths[-1], min_ngram=lengths[0])
    state = drafter.prefill(text[:1], torch.empty(1, 0), text[1])
    done = 2
    for size in [*cuts, len(text)]:
        if done < len(text):
            drafter.commit(state, torch.empty(size, 0), text[done : done + size])
            done += size
    (tree,) = drafter.draft([DraftRequest(state, text[-1], plan)])
    assert as_mapping(tree) == lookup_twin(text, plan, lengths)


def test_lookup_reads_the_last_64_occurrences_of_an_ngram() -> None:
    """A long monotonous text does not make a draft slow: older occurrences are not looked at."""
    drafter = PromptLookupDrafter(max_ngram=1, min_ngram=1)
    text = [1, 7, *[1] * 65]
    plan = Topology.from_paths([(0,), (1,)])
    state = drafter.prefill(text[:-1], torch.empty(66, 0), 1)
    (tree,) = drafter.draft([DraftRequest(state, 1, plan)])
    assert as_mapping(tree) == lookup_twin(text, plan, range(1, 2)) == {(0,): 1}


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), trees)
def test_lookup_never_goes_beyond_the_plan(text: list[int], plan: Topology) -> None:
    """The tree that is returned is a valid part of the plan, the root's token first."""
    drafter = PromptLookupDrafter()
    state = drafter.prefill(text[:-1], torch.empty(len(text) - 1, 0), text[-1])
    (tree,) = drafter.draft([DraftRequest(state, text[-1], plan)])
    assert set(Topology.from_paths(tree.topology.paths).paths) <= set(plan.paths)
    assert tree.tokens[0] == text[-1]


def test_lookup_finds_nothing_in_a_text_without_repetition() -> None:
    """No target row is spent on a guess that does not exist."""
    drafter = PromptLookupDrafter()
    state = drafter.prefill(range(20), torch.empty(20, 0), 20)
    (tree,) = drafter.draft([DraftRequest(state, 20, named_topologies()["chain4"])])
    assert tree.topology == Topology(())


def test_lookup_keeps_sequences_apart() -> None:
    """Each request drafts from its own text."""
    drafter, plan = PromptLookupDrafter(), Topology.from_paths([(0,)])
    states = [drafter.prefill(text, torch.empty(4, 0), 2) for text in ([1, 2, 5, 1], [1, 2, 6, 1])]
    drafted = drafter.draft([DraftRequest(state, 2, plan) for state in states])
    assert [tree.tokens.tolist() for tree in drafted] == [[2, 5], [2, 6]]


# -- the empty drafter, and what a drafter cannot fill ---------------------------------------------


def test_the_empty_drafter_returns_the_root_alone() -> None:
    """Plain decoding is the same loop with empty trees, whatever the plan."""
    drafter = EmptyDrafter()
    state = drafter.prefill([1], torch.empty(1, 0), 5)
    (tree,) = drafter.draft([DraftRequest(state, 5, named_topologies()["chain4"])])
    assert (tree.topology, tree.tokens.tolist()) == (Topology(()), [5])


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    """The error names both depths."""
    with pytest.raises(TopologyError, match=r"5 deep.* hydra .*4 heads"):
        check_depth(random_drafter("hydra"), Topology.from_paths([(0,) * n for n in range(1, 6)]))


def test_a_rank_beyond_the_hot_vocabulary_is_refused() -> None:
    """The error names the rank and the limit."""
    with pytest.raises(TopologyError, match=rf"rank {HOT}.* medusa .*{HOT} tokens"):
        check_depth(random_drafter("medusa"), Topology.from_paths([(HOT,)]))


def test_the_deepest_tree_and_the_last_rank_are_accepted() -> None:
    """The limits themselves are legal."""
    deepest = Topology.from_paths([(HOT - 1,) * depth for depth in range(1, HEADS + 1)])
    check_depth(random_drafter("medusa"), deepest)


def test_lookup_has_no_limit_of_depth_or_rank() -> None:
    """Any tree may be asked of a drafter that fills what it can."""
    check_depth(PromptLookupDrafter(), Topology.from_paths([(99,) * n for n in range(1, 40)]))


def test_coupled_children_are_ranked_with_the_noise_of_their_position() -> None:
    """Scores over the temperature plus the noise of the hot tokens, one position a depth."""
    hot = torch.tensor([3, 7, 8, 11, 20])
    scores = torch.tensor([[0.3, 0.1, 0.9, -0.5, 0.4], [1.0, 2.0, 0.0, 0.5, -1.0]])
    plan = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
    coupling = Coupling(NoiseSource(9, VOCAB), temperature=0.7, position=100)
    request = DraftRequest(None, 5, plan, coupling)
    tree = torch.full((7,), 5)
    level = plan.levels[1]
    BestChildren().pick(
        ScoredRows(1, [0], [request], [tree], [level], [2], [level.parent_rows], scores, hot)
    )
    noise = gumbel_noise(9, 101, 21)[hot]
    expected = [hot[torch.sort(row / 0.7 + noise, descending=True).indices[:2]] for row in scores]
    assert tree[3:].tolist() == torch.cat(expected).tolist()
