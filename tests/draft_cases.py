"""Drafters in the native core on tiny models: forced trees, and what their rows are scored."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from entmtp.drafters.base import Drafter, DrafterState, DraftRequest
from entmtp.drafters.heads import Heads, build_heads
from entmtp.drafters.picking import ScoredRows
from entmtp.loading.drafters import make_drafter, make_torch_drafter
from entmtp.target.base import Target
from entmtp.topology import Path, Topology
from exactness import random_heads
from native_cases import make_native, tokens_of

__all__ = [
    "DRAFTERS",
    "Forced",
    "Text",
    "assert_drafts_agree",
    "core_drafter",
    "forced_scores",
    "make_heads",
    "torch_drafter",
]

DRAFTERS = {
    "medusa": ("medusa", {}),
    "medusa, tied, own output": (
        "medusa",
        {"is_tied": True, "num_layers": 3, "has_own_output": True},
    ),
    "hydra": ("hydra", {"embed_scale": 3.0}),
    "hydra, one layer": ("hydra", {"num_layers": 1, "num_heads": 3}),
    "hydra, shared output": (
        "hydra",
        {"has_own_output": True, "is_output_shared": True, "has_output_bias": False},
    ),
    "hydra++": ("hydra++", {}),
    "mtp": ("mtp", {}),
    "mtp, hidden first, own output": ("mtp", {"hidden_first": True, "has_own_output": True}),
}
"""Kind and changes of a configuration, by name."""


@lru_cache(maxsize=32)
def make_heads(name: str, case: str, seed: int = 3) -> Heads:
    """Random heads for a model of :data:`native_cases.CASES`; copy them before use."""
    kind, changes = DRAFTERS[name]
    plain = random_heads(kind, make_native(case), seed)
    config = replace(plain.config, **{"hidden_first": False, **changes})
    heads = build_heads(config, plain.hot_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in heads.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.1
            weight.copy_(1 + noise if "norm" in key else noise)
    return heads


@lru_cache(maxsize=64)
def core_drafter(name: str, case: str, threads: int = 1, isa: str = "auto") -> Drafter:
    """Heads in the core."""
    return make_drafter(copy.deepcopy(make_heads(name, case)), make_native(case, threads, isa))


def torch_drafter(name: str, case: str, target: Target) -> Drafter:
    """The same heads computed by torch, on any target of the same sizes."""
    return make_torch_drafter(copy.deepcopy(make_heads(name, case)), target)


@dataclass(frozen=True)
class Text:
    """A sequence as a drafter is shown it.

    Attributes:
        number: tells texts apart.
        size: of the prompt.
        pieces: tokens committed at each step after it.
        drafts_between: whether a tree is drafted before each commit.
    """

    number: int
    size: int
    pieces: tuple[int, ...] = ()
    drafts_between: bool = False

    def start(self, drafter: Drafter, case: str) -> DrafterState:
        """State after all pieces."""
        total = self.size + sum(self.pieces)
        tokens = tokens_of(make_native(case), total + 1, 50 + self.number).tolist()
        hidden = self.hidden(case, total)
        at = self.size
        state = drafter.prefill(tokens[:at], hidden[:at], tokens[at])
        for piece in self.pieces:
            if self.drafts_between:
                tree = Topology.from_paths([(0,), (0, 0), (1,), (1, 1)])
                drafter.draft([DraftRequest(state, tokens[at], tree)])
            drafter.commit(state, hidden[at : at + piece], tokens[at + 1 : at + 1 + piece])
            at += piece
        return state

    def root(self, case: str) -> int:
        """The newest token."""
        total = self.size + sum(self.pieces)
        return int(tokens_of(make_native(case), total + 1, 50 + self.number)[-1])

    def hidden(self, case: str, total: int) -> Tensor:
        """Seeded states; those of a longer text begin alike."""
        generator = torch.Generator().manual_seed(self.number)
        size = make_native(case).config.hidden_size
        return torch.stack([torch.randn(size, generator=generator) for _ in range(total)])


Scores = dict[tuple[int, Path], Tensor]
"""Scores of the children of a node, by text and path."""


class Forced:
    """Sets children by text and path, whatever their scores, and keeps the scores."""

    takes_best = False

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self.scores: Scores = {}

    def pick(self, rows: ScoredRows) -> None:
        parts = torch.split(rows.scores, list(rows.counts))
        for at, index in enumerate(rows.indices):
            number, level = self._texts[index].number, rows.levels[at]
            for child, row in zip(level.children, rows.parent_rows[at], strict=True):
                path = rows.requests[at].plan.paths[child - 1]
                rng = random.Random(hash((number, path)))
                rows.trees[at][child] = rows.hot_ids[rng.randrange(len(rows.hot_ids))]
                self.scores[number, path[:-1]] = parts[at][row]


def forced_scores(
    drafter: Drafter, case: str, texts: Sequence[Text], plans: Sequence[Topology]
) -> Scores:
    """Scores of all rows of a batch of forced trees."""
    picker = Forced(texts)
    requests = [
        DraftRequest(text.start(drafter, case), text.root(case), plan)
        for text, plan in zip(texts, plans, strict=True)
    ]
    drafter.fill(requests, picker)  # type: ignore[attr-defined]
    return picker.scores


def assert_drafts_agree(case: str, isas: Sequence[str]) -> None:
    """Two texts, forced trees: the same scores under each instruction set and number of threads."""
    texts = [Text(0, 140, (2,)), Text(1, 3)]
    plans = [Topology.from_paths([(a,) * d for a in range(5) for d in (1, 2, 3)])] * 2
    for name in DRAFTERS:
        results = [
            forced_scores(core_drafter(name, case, 1 + number % 2, isa), case, texts, plans)
            for number, isa in enumerate(isas)
        ]
        for isa, scores in zip(isas, results, strict=True):
            assert scores.keys() == results[0].keys()
            for key, row in scores.items():
                assert torch.equal(row, results[0][key]), (case, name, isa, key)
