"""Trees that grow beside copies, on texts that repeat themselves, change no token."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp.drafters.base import AnyRequest, Drafter, DraftTree
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.growth import COPY_RANK
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler, TopologyScheduler
from entmtp.target.base import Target
from entmtp.topology import Topology
from exactness import RandomScheduler, outcome, random_topology
from fakes import ByteTokenizer
from growing import GrowingScheduler, random_envelope
from tiny_drafting import KINDS, every_backend, repeating, tiny_drafter, tiny_model

every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Counting:
    """A drafter that counts its trees and their copied nodes.

    Attributes:
        drafter: that is asked.
        num_trees: that were drafted.
        num_copied: nodes of copies in them.
        num_below: of those, nodes that hang below one of the drafter's own.
    """

    drafter: Drafter
    num_trees: int = 0
    num_copied: int = 0
    num_below: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.drafter, name)

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        trees = self.drafter.draft(requests)
        self.num_trees += len(trees)
        for tree in trees:
            copied = [path for path in tree.topology.paths if path[-1] == COPY_RANK]
            self.num_copied += len(copied)
            self.num_below += sum(path[0] != COPY_RANK for path in copied)
        return trees


def growing(rng: random.Random, depth: int) -> GrowingScheduler:
    """Any rules in any envelopes, and now and then the envelope itself."""
    envelopes = [random_envelope(rng, 20, depth) for _ in range(3)]
    return GrowingScheduler(rng.randrange(2**32), envelopes, rng.choice([0.0, 0.3]))


def policy(rng: random.Random, depth: int) -> TopologyScheduler:
    """Mostly one that grows trees."""
    trees = [random_topology(rng, 20, depth) for _ in range(3)]
    others = [FixedScheduler.plain(), RandomScheduler(rng.randrange(2**32), trees)]
    return growing(rng, depth) if rng.random() < 0.7 else rng.choice(others)


def assert_exact(target: Target, drafter: Counting, requests: list[Request], chunk: int) -> None:
    """In batches of at most three, token by token what each gets alone and without drafts."""
    tokenizer = ByteTokenizer(target.config.vocab_size, (3,))
    plain = Engine(target, EmptyDrafter(), FixedScheduler.plain(), tokenizer)
    expected = [plain.run([replace(request, scheduler=None)])[0] for request in requests]
    limits = EngineLimits(max_batch_size=3, prefill_chunk=chunk, spare_rows=4)
    engine = Engine(target, drafter, FixedScheduler.plain(), tokenizer, limits)  # type: ignore[arg-type]
    assert [outcome(r) for r in engine.run(requests)] == [outcome(r) for r in expected]


@every_backend
@every_kind
@given(seed=st.integers(0, 10**6))
@settings(max_examples=12)
def test_batches_of_mixed_policies_give_the_tokens_of_plain_decoding(
    backend: str, kind: str, seed: int
) -> None:
    """Greedy and sampled, with and without penalties; each sequence has a policy of its own."""
    rng = random.Random(seed)
    target, drafter = tiny_model(backend), Counting(tiny_drafter(backend, kind))
    requests = [
        Request(
            repeating(rng, target.config.vocab_size, 30),
            SamplingParams(
                max_new_tokens=rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
                seed=rng.randrange(2**40),
                ignore_eos=rng.random() < 0.7,
            ),
            policy(rng, drafter.drafter.max_depth or 6),
        )
        for _ in range(rng.randint(1, 5))
    ]
    assert_exact(target, drafter, requests, rng.choice([5, 512]))


@every_backend
@every_kind
def test_copies_go_up_to_the_last_token_that_is_allowed(backend: str, kind: str) -> None:
    """By the limit of the request or by the window; no token comes after it."""
    rng = random.Random(7)
    target, drafter = tiny_model(backend, 40), Counting(tiny_drafter(backend, kind, 40))
    depth = drafter.drafter.max_depth or 6
    for size, most in ((1, 2), (3, 3), (12, 5), (30, 100), (36, 100), (38, 100), (39, 100)):
        words = [rng.randrange(target.config.vocab_size) for _ in range(3)]
        for temperature in (0.0, 0.7):
            sampling = SamplingParams(most, temperature, seed=size, ignore_eos=True)
            prompt = tuple((words * size)[:size])
            requests = [Request(prompt, sampling, growing(rng, depth)) for _ in range(4)]
            assert_exact(target, drafter, requests, 512)
    assert drafter.num_copied > 20


@every_backend
@every_kind
def test_copies_are_checked_and_accepted(backend: str, kind: str) -> None:
    """The cases above are no empty promise: chains of copies, on the root and below, are kept."""
    rng = random.Random(3)
    target, drafter = tiny_model(backend), Counting(tiny_drafter(backend, kind))
    wide = Topology.from_paths([(rank,) for rank in range(min(drafter.drafter.max_width or 0, 60))])
    prompts = [repeating(rng, target.config.vocab_size, 30) for _ in range(4)]
    requests = [
        Request(
            prompt,
            SamplingParams(max_new_tokens=60, temperature=temperature, seed=1, ignore_eos=True),
            GrowingScheduler(9, [wide]),
        )
        for prompt in prompts
        for temperature in (0.0, 1.0)
    ]
    tokenizer = ByteTokenizer(target.config.vocab_size)
    engine = Engine(target, drafter, FixedScheduler.plain(), tokenizer)  # type: ignore[arg-type]
    results = engine.run(requests)
    assert drafter.num_copied > drafter.num_trees / 2
    assert drafter.num_below > 0
    steps = [step for result in results for step in result.stats.steps]
    assert max(step.num_accepted for step in steps) > 3
