"""The engine: admission, batching, streams, records, and what it refuses."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult, Request, StreamChunk
from entmtp.errors import InputError, NumericalError, TopologyError
from entmtp.params import SamplingParams, TypicalParams
from entmtp.sampling import choose_token
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal
from entmtp.target.base import KVCache, Segment, Target, TargetOutput
from entmtp.topology import Topology, named_topologies
from fakes import ByteTokenizer, HopelessDrafter, PerfectDrafter, ScriptedDrafter, tiny_target

TARGET = tiny_target(seed=1, dtype=torch.float64, scale=0.3)
TREE = Topology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)])
PROMPT = (5, 9, 2)


def sampling(num_tokens: int = 16, **changes: object) -> SamplingParams:
    """Seeded sampling, which gives a varied text, without an end-of-text token."""
    values = {"temperature": 1.0, "seed": 7, "ignore_eos": True, **changes}
    return SamplingParams(max_new_tokens=num_tokens, **values)  # type: ignore[arg-type]


def make_engine(
    drafter: Drafter | None = None,
    tree: Topology = TREE,
    target: Target = TARGET,
    limits: EngineLimits | None = None,
) -> Engine:
    """An engine with one fixed tree; plain decoding where no drafter is given."""
    scheduler = FixedScheduler("tree", tree if drafter else Topology(()))
    return Engine(target, drafter or EmptyDrafter(), scheduler, ByteTokenizer(), limits)


def plain(prompt: Sequence[int] = PROMPT, params: SamplingParams | None = None) -> GenerationResult:
    """What plain decoding gives."""
    return make_engine().generate(prompt, params or sampling())


def text_of(num_tokens: int = 64) -> list[int]:
    """The prompt and its plain continuation."""
    return [*PROMPT, *plain(params=sampling(num_tokens)).token_ids]


def perfect() -> PerfectDrafter:
    """A drafter whose rank 0 is always right for ``PROMPT`` under :func:`sampling`."""
    return PerfectDrafter([text_of()])


def drain(engine: Engine) -> list[StreamChunk]:
    """All chunks until nothing is left to do."""
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    return chunks


# -- admission and batching ------------------------------------------------------------------------


def test_waiting_requests_are_admitted_in_order_as_places_become_free() -> None:
    """With room for one, a request starts only when the one before it has ended."""
    engine = make_engine(limits=EngineLimits(max_batch_size=1))
    ids = [engine.submit(Request(PROMPT, sampling(4))) for _ in range(3)]
    order = [chunk.request_id for chunk in drain(engine)]
    assert order == [i for i in ids for _ in range(4)]


def test_no_more_than_max_batch_size_sequences_run_at_once() -> None:
    """A step gives chunks of at most that many requests."""
    engine = make_engine(limits=EngineLimits(max_batch_size=2))
    for _ in range(5):
        engine.submit(Request(PROMPT, sampling(6)))
    sizes = []
    while engine.has_work:
        sizes.append(len({chunk.request_id for chunk in engine.step()}))
    assert max(sizes) == 2


def test_each_prompt_of_a_batch_gets_the_tokens_it_gets_alone() -> None:
    """A row's reported seed reproduces it alone."""
    prompts = [PROMPT, (1,), (200, 3, 3, 3, 3, 4)]
    results = make_engine(perfect()).generate_batch(prompts, sampling())
    for prompt, result in zip(prompts, results, strict=True):
        assert plain(prompt, sampling(seed=result.seed)).token_ids == result.token_ids


def test_an_empty_batch_gives_no_results() -> None:
    """Nothing to do is no error."""
    assert make_engine().generate_batch([]) == []


def test_a_cancelled_waiting_request_never_runs() -> None:
    """It leaves the queue and gives no chunk."""
    engine = make_engine(limits=EngineLimits(max_batch_size=1))
    first, second = (engine.submit(Request(PROMPT, sampling(4))) for _ in range(2))
    engine.step()
    engine.cancel(second)
    assert {chunk.request_id for chunk in drain(engine)} == {first}


def test_a_cancelled_running_request_makes_room() -> None:
    """The next request is admitted, and the cancelled one gives no further chunk."""
    engine = make_engine(limits=EngineLimits(max_batch_size=1))
    first, second = (engine.submit(Request(PROMPT, sampling(4))) for _ in range(2))
    engine.step()
    engine.cancel(first)
    assert [chunk.request_id for chunk in drain(engine)] == [second] * 4


def test_cancelling_an_unknown_request_is_ignored() -> None:
    """A client may go away after its text has ended."""
    engine = make_engine()
    request_id = engine.submit(Request(PROMPT, sampling(1)))
    drain(engine)
    engine.cancel(request_id)
    engine.cancel(999)
    assert not engine.has_work


def test_a_step_without_work_does_nothing() -> None:
    """No request, no chunk, no forward."""
    assert make_engine().step() == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 512])
def test_prefill_chunk_changes_no_token(chunk: int) -> None:
    """Prompts read in pieces of any size, together, give the tokens of prompts read at once."""
    prompts = [PROMPT, (1,), tuple(range(8)), (7, 7)]
    engine = make_engine(perfect(), limits=EngineLimits(prefill_chunk=chunk))
    expected = make_engine().generate_batch(prompts, sampling())
    results = engine.generate_batch(prompts, sampling())
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


@pytest.mark.parametrize(
    "limits", [{"max_batch_size": 0}, {"prefill_chunk": 0}, {"spare_rows": -1}]
)
def test_limits_under_which_nothing_could_run_are_refused(limits: dict[str, int]) -> None:
    """The error comes when the limits are made."""
    with pytest.raises(InputError, match=next(iter(limits))):
        EngineLimits(**limits)


def test_a_tree_larger_than_the_spare_rows_is_decoded() -> None:
    """Regression: a cache that grew in a forward refused the commit of a branch."""
    text = text_of()
    drafter = ScriptedDrafter(lambda above, rank: (text[len(above)] + rank - 2) % 257)
    tree = Topology.from_paths([(0,), (1,), (2,), (2, 0), (2, 2)])
    engine = make_engine(drafter, tree, limits=EngineLimits(spare_rows=0))
    result = engine.generate(PROMPT, sampling(30))
    assert result.token_ids == tuple(text[3:33])


# -- what is refused -------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to continue."""
    with pytest.raises(InputError, match="empty"):
        make_engine().submit(Request(()))


def test_a_prompt_that_fills_the_window_is_refused() -> None:
    """The error names both sizes."""
    with pytest.raises(InputError, match=r"256 tokens.*window holds 256"):
        make_engine().submit(Request((1,) * 256))


def test_a_prompt_beyond_the_sliding_window_is_told_so() -> None:
    """Where the window of the attention is the limit, and not the positions, the error says so."""
    engine = make_engine(target=tiny_target(context_window=40, sliding_window=40))
    message = r"has 40 tokens, but .* holds 40 with the answer, the reach of the model's sliding"
    with pytest.raises(InputError, match=message):
        engine.submit(Request((1,) * 40))
    with pytest.raises(InputError) as error:
        make_engine().submit(Request((1,) * 256))
    assert "sliding" not in str(error.value)


@pytest.mark.parametrize("token", [-1, 257])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """The error names the token and the size of the vocabulary."""
    with pytest.raises(InputError, match=rf"token id {token} .*vocabulary of 257"):
        make_engine().submit(Request((1, token, 2)))


def test_a_batch_with_one_bad_prompt_leaves_nothing_behind() -> None:
    """All prompts are checked before any is queued."""
    engine = make_engine()
    with pytest.raises(InputError):
        engine.generate_batch([PROMPT, ()])
    assert not engine.has_work


def test_a_bad_stream_is_refused_before_its_first_chunk() -> None:
    """The error comes from the call, not from the iteration."""
    with pytest.raises(InputError):
        make_engine().stream(())


def test_a_tree_deeper_than_the_heads_is_refused_and_leaves_nothing_behind() -> None:
    """The engine can be used again after the error."""
    drafter = ScriptedDrafter(lambda above, rank: rank, max_depth=2)
    engine = make_engine(drafter)
    with pytest.raises(TopologyError, match="3 deep"):
        engine.generate(PROMPT, sampling())
    assert not engine.has_work


def test_logits_that_are_not_finite_are_an_error() -> None:
    """Broken weights are reported, and the request does not stay in the engine."""
    engine = make_engine(target=tiny_target(scale=math.nan))
    with pytest.raises(NumericalError, match="not finite"):
        engine.generate(PROMPT)
    assert not engine.has_work


class PoisonedTarget:
    """A target whose logits are NaN for every segment that holds one given token."""

    def __init__(self, target: Target, poison: int) -> None:
        self._target, self._poison = target, poison
        self.config, self.device, self.dtype = target.config, target.device, target.dtype
        self.has_own_threads = target.has_own_threads
        self.backend, self.embedding = target.backend, target.embedding
        self.precision = target.precision
        self.weights_digest = target.weights_digest
        self.output_rows = target.output_rows

    def new_cache(self, capacity: int) -> KVCache:
        return self._target.new_cache(capacity)

    def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> TargetOutput:
        output = self._target.forward(segments, needs_logits=needs_logits)
        logits = tuple(
            row * math.nan if self._poison in segment.tokens.tolist() else row
            for segment, row in zip(segments, output.logits, strict=True)
        )
        return TargetOutput(logits, output.hidden)


def test_a_request_that_fails_does_not_change_the_others() -> None:
    """Regression: a failing request made the others lose tokens whose rows were committed."""
    expected = plain().token_ids
    drafted = {token + rank for token in [0, *text_of()] for rank in range(3)}
    poison = next(token for token in range(257) if token not in drafted)
    engine = make_engine(perfect(), target=PoisonedTarget(TARGET, poison))
    good = engine.submit(Request(PROMPT, sampling()))
    chunks = engine.step() + engine.step()
    bad = engine.submit(Request((poison,), sampling()))
    with pytest.raises(NumericalError):
        engine.step()
    engine.cancel(bad)
    chunks += drain(engine)
    assert {chunk.request_id for chunk in chunks} == {good}
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected


# -- streams ---------------------------------------------------------------------------------------


def test_the_chunks_of_a_stream_join_to_what_generate_gives() -> None:
    """Tokens and text arrive in order; the last chunk carries the whole result."""
    chunks = list(make_engine(perfect()).stream(PROMPT, sampling()))
    expected = plain()
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_closing_a_stream_cancels_its_request() -> None:
    """A reader that goes away costs no further forward."""
    engine = make_engine()
    stream: Iterator[StreamChunk] = engine.stream(PROMPT, sampling())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_work


def test_a_stream_that_was_never_read_queues_nothing() -> None:
    """Work begins with the first chunk that is asked for."""
    engine = make_engine()
    engine.stream(PROMPT, sampling())
    assert not engine.has_work


def test_two_streams_read_in_turn_both_get_their_whole_text() -> None:
    """Regression: a stream threw away the chunks of the other, which then never ended."""
    engine = make_engine(perfect())
    expected = plain().token_ids
    streams = [engine.stream(PROMPT, sampling()) for _ in range(2)]
    tokens: list[list[int]] = [[], []]
    for _ in range(2 * len(expected)):
        for stream, taken in zip(streams, tokens, strict=True):
            taken += next(stream, StreamChunk(-1, "", ())).token_ids
    assert tokens == [list(expected)] * 2


def test_generate_inside_a_stream_leaves_the_stream_whole() -> None:
    """Regression: a call of generate threw away the chunks of a stream that was open."""
    engine = make_engine()
    stream = engine.stream(PROMPT, sampling())
    tokens = [*next(stream).token_ids]
    assert engine.generate(PROMPT, sampling()).token_ids == plain().token_ids
    tokens += (token for chunk in stream for token in chunk.token_ids)
    assert tuple(tokens) == plain().token_ids


def test_a_cancelled_stream_ends() -> None:
    """Regression: iterating a stream whose request had been cancelled by its id never ended."""
    engine = make_engine()
    stream = engine.stream(PROMPT, sampling())
    engine.cancel(next(stream).request_id)
    assert list(stream) == []


# -- prompts ---------------------------------------------------------------------------------------


def test_a_chat_prompt_from_text_is_one_user_turn() -> None:
    """Text is short for a list of one message."""
    engine = make_engine()
    messages = [{"role": "user", "content": "hi"}]
    assert engine.chat_prompt("hi") == engine.chat_prompt(messages) == tuple(b"<user>hi\n")


@pytest.mark.parametrize(
    "messages",
    ["", " \n", [], [{"role": "user", "content": " "}], [{"role": "user"}]],
    ids=["text", "blank", "no-turn", "blank-turn", "no-content"],
)
def test_a_chat_prompt_without_words_is_refused(messages: str | list[dict[str, str]]) -> None:
    """An empty turn is an error, not an empty prompt."""
    with pytest.raises(InputError, match="empty"):
        make_engine().chat_prompt(messages)


def test_text_and_its_token_ids_are_the_same_prompt() -> None:
    """Raw text goes through the tokenizer, ids pass."""
    engine = make_engine()
    by_text = engine.generate("abc", sampling())
    assert by_text.token_ids == engine.generate(np.array([97, 98, 99]), sampling()).token_ids


# -- seeds, penalties, the rule --------------------------------------------------------------------


def test_a_seed_that_was_not_given_is_drawn_and_reported() -> None:
    """Running again with the reported seed gives the same tokens."""
    result = make_engine().generate(PROMPT, sampling(seed=None))
    assert plain(params=sampling(seed=result.seed)).token_ids == result.token_ids


def test_drawn_seeds_differ_from_call_to_call() -> None:
    """Two calls without a seed are two draws."""
    engine = make_engine()
    seeds = {engine.generate(PROMPT, sampling(1, seed=None)).seed for _ in range(8)}
    assert len(seeds) == 8


def test_rows_of_a_batch_have_seeds_of_their_own() -> None:
    """Row 0 keeps the seed that was given."""
    results = make_engine().generate_batch([PROMPT] * 4, sampling(seed=11))
    seeds = [result.seed for result in results]
    assert seeds[0] == 11
    assert len(set(seeds)) == len({result.token_ids for result in results}) == 4


def slow_decode(prompt: Sequence[int], params: SamplingParams, seed: int) -> tuple[int, ...]:
    """The slow twin of plain decoding: every token from a forward over the whole text."""
    text = list(prompt)
    while len(text) < len(prompt) + params.max_new_tokens:
        segment = Segment(TARGET.new_cache(64), torch.tensor(text), np.arange(len(text)))
        row = TARGET.forward([segment]).logits[0][-1]
        history = (prompt, text[len(prompt) :])
        text.append(choose_token(row, params, seed, len(text), history))
    return tuple(text[len(prompt) :])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 1.5},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "repetition", "presence", "frequency", "sampled"],
)
def test_cached_tree_decoding_equals_a_forward_over_the_whole_text(
    changes: dict[str, float],
) -> None:
    """Caches, trees and penalties along accepted paths give what recomputing everything gives."""
    params = sampling(24, **changes)
    expected = slow_decode(PROMPT, params, 7)
    drafter = PerfectDrafter([[*PROMPT, *expected]])
    assert make_engine(drafter).generate(PROMPT, params).token_ids == expected


def test_penalties_change_the_text() -> None:
    """A frequency penalty breaks the repetition that greedy decoding of a tiny model falls into."""
    greedy = plain(params=sampling(40, temperature=0.0)).token_ids
    penalised = plain(params=sampling(40, temperature=0.0, frequency_penalty=50.0)).token_ids
    assert len(set(greedy)) < len(set(penalised)) == 40


# -- records ---------------------------------------------------------------------------------------

DEEP_TREES = {
    "chain1": [(0,) * n for n in range(1, 2)],
    "chain3": [(0,) * n for n in range(1, 4)],
    "chain6": [(0,) * n for n in range(1, 7)],
    "branching": [(0,), (1,), (2,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (0, 0, 1)],
    "published": named_topologies()["mc_sim_7b_63"].paths,
}


@pytest.mark.parametrize("paths", DEEP_TREES.values(), ids=DEEP_TREES)
def test_a_perfect_drafter_gives_depth_plus_one_tokens_a_step(paths: list[list[int]]) -> None:
    """Every step keeps the deepest path and adds the bonus token."""
    tree = Topology.from_paths(paths)
    num_tokens = 1 + 3 * (tree.max_depth + 1)
    stats = make_engine(perfect(), tree).generate(PROMPT, sampling(num_tokens)).stats
    assert [step.num_accepted for step in stats.steps] == [tree.max_depth] * 3
    assert stats.mean_acceptance_length == tree.max_depth + 1


@pytest.mark.parametrize("paths", DEEP_TREES.values(), ids=DEEP_TREES)
def test_a_hopeless_drafter_gives_exactly_one_token_a_step(paths: list[list[int]]) -> None:
    """No draft is kept: the cost of plain decoding, and its output."""
    drafter = HopelessDrafter([text_of()])
    result = make_engine(drafter, Topology.from_paths(paths)).generate(PROMPT, sampling(12))
    assert result.stats.num_steps == 11
    assert result.stats.mean_acceptance_length == 1.0
    assert result.token_ids == plain(params=sampling(12)).token_ids


def test_the_right_token_is_found_at_any_rank() -> None:
    """A path through late children behind gaps is kept whole."""
    text, ranks = text_of(), (4, 0, 9)
    root_length = len(PROMPT) + 1

    def token(above: Sequence[int], rank: int) -> int:
        is_right = rank == ranks[(len(above) - root_length) % 4]
        return (text[len(above)] + (0 if is_right else 1 + rank)) % 257

    tree = Topology.from_paths([(1,), (4,), (4, 0), (4, 2), (4, 0, 3), (4, 0, 9), (1, 5)])
    stats = make_engine(ScriptedDrafter(token), tree).generate(PROMPT, sampling(13)).stats
    assert [step.num_accepted for step in stats.steps] == [3, 3, 3]


class AlternatingScheduler:
    """Two trees in turn, and the empty one every third step."""

    policy = "alternating"

    def start(self) -> list[int]:
        return [0]

    def choose(self, state: list[int], signal: Signal) -> SchedulerDecision:
        state[0] += 1
        kind = state[0] % 3
        plan = [Topology(()), TREE, Topology.from_paths([(0,)])][kind]
        return SchedulerDecision(["none", "tree", "one"][kind], plan, kind)


def test_the_counts_of_the_stats_agree() -> None:
    """Steps by topology sum to the steps, and tokens are 1 + steps + accepted where none is cut."""
    engine = make_engine(perfect())
    stats = engine.generate(PROMPT, sampling(22), scheduler=AlternatingScheduler()).stats
    assert sum(stats.topology_steps.values()) == stats.num_steps
    assert stats.num_tokens == 22 == 1 + stats.num_steps + stats.num_accepted
    assert stats.mean_acceptance_length == 1 + stats.num_accepted / stats.num_steps
    assert set(stats.topology_steps) == {"none", "tree", "one"}


def test_the_stats_name_what_was_run() -> None:
    """Backend, dtype, drafter, policy and the kind of verification are reported."""
    stats = make_engine(perfect()).generate(PROMPT, sampling()).stats
    assert (stats.backend, stats.dtype, stats.drafter, stats.policy, stats.verification) == (
        "torch-cpu",
        "float64",
        "perfect",
        "fixed",
        "exact",
    )


def test_the_stats_of_a_single_token_have_no_step() -> None:
    """The first token comes from the prompt's own forward."""
    stats = make_engine(perfect()).generate(PROMPT, sampling(1)).stats
    assert (stats.num_tokens, stats.num_steps, stats.mean_acceptance_length) == (1, 0, 1.0)


def test_typical_acceptance_is_labelled_lossy() -> None:
    """Whoever reads the stats sees that the output is not the target's own."""
    typical = TypicalParams()
    result = make_engine(perfect()).generate(PROMPT, sampling(), typical=typical)
    assert result.stats.verification == "typical (lossy)"
    assert len(result.token_ids) == 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_observer_sees_the_row_that_each_token_was_chosen_from(temperature: float) -> None:
    """In plain and in tree decoding alike, every token follows from its observed row."""
    params = sampling(temperature=temperature)
    expected = plain(params=params).token_ids
    engine = make_engine(PerfectDrafter([[*PROMPT, *expected]]))
    rows: dict[tuple[int, int], Tensor] = {}
    engine.logits_observer = lambda i, index, row: rows.update({(i, index): row})
    assert engine.generate(PROMPT, params).token_ids == expected
    chosen = [
        choose_token(rows[0, index], params, 7, len(PROMPT) + index, ((), ()))
        for index in range(len(expected))
    ]
    assert tuple(chosen) == expected
    assert len(rows) == len(expected)


class CopyingScheduler(FixedScheduler):
    """Says that its plans may hold copies."""

    can_copy = True


def test_a_prompt_is_read_for_copies_with_its_first_token() -> None:
    """Where the scheduler can copy; that time is of the prefill."""
    for kind, num_read in ((FixedScheduler, None), (CopyingScheduler, len(PROMPT))):
        engine = make_engine()
        engine.submit(Request(PROMPT, sampling(4), kind.plain()))
        engine.step()
        (sequence,) = engine._running
        assert sequence.is_prefilled
        found = sequence._copies
        assert (None if found is None else len(found)) == num_read


@pytest.mark.parametrize("has_own_threads", [True, False])
def test_torch_steps_aside_for_a_target_with_threads_of_its_own(has_own_threads: bool) -> None:
    """One thread of torch while a step is made, as many as before when it has failed or ended."""
    seen: list[int] = []

    class Watching(PoisonedTarget):
        def forward(
            self, segments: Sequence[Segment], *, needs_logits: bool = True
        ) -> TargetOutput:
            seen.append(torch.get_num_threads())
            return super().forward(segments, needs_logits=needs_logits)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        target = Watching(tiny_target(), PROMPT[0])
        target.has_own_threads = has_own_threads
        engine = Engine(target, EmptyDrafter(), FixedScheduler.plain(), ByteTokenizer())
        with pytest.raises(NumericalError):
            engine.generate(PROMPT, sampling())
        assert seen == [1 if has_own_threads else 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
