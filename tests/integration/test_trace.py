"""A trace replays what decoding does: the same steps, whatever the drafter, tree or policy."""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from entmtp.calibrate import collect
from entmtp.calibrate.collect import TracePrompt, TraceSettings, collect_trace
from entmtp.calibrate.grow import GrowParams, grow_all
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import Counts, text_counts
from entmtp.calibrate.session import forget_traces, trace_facts, trace_prompts, usual_envelope
from entmtp.calibrate.trace import MISS, Trace, TraceFacts, load_trace, save_trace
from entmtp.drafters.base import Coupling, Drafter, DraftRequest, GrowRequest
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, GenerationResult, Request
from entmtp.errors import InputError, TopologyError, TraceError
from entmtp.growth import UNSCORED, GrowthPlan
from entmtp.noise import NoiseSource
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler, TopologyScheduler
from entmtp.target.base import Segment
from entmtp.topology import Topology, named_topologies
from entmtp.workload import PromptRecord
from exactness import RandomScheduler, make_drafter, random_topology
from fakes import ByteTokenizer, tiny_target

VOCAB = 12
TARGET = tiny_target(seed=5, dtype=torch.float64, vocab_size=VOCAB, context_window=512)
KINDS = ["medusa", "hydra", "hydra++", "mtp", "lookup"]
SAMPLING = SamplingParams(max_new_tokens=40, seed=7)
ENVELOPE = Topology.from_paths([(a,) * d for a in (0, 1, 4) for d in (1, 2, 3)])


def prompts(count: int, seed: int = 0) -> list[TracePrompt]:
    """Prompts of 1 to 20 tokens, two tasks in turn."""
    rng = random.Random(seed)
    return [
        TracePrompt(
            f"p{number}",
            "ab"[number % 2],
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))),
        )
        for number in range(count)
    ]


def engine_of(drafter: Drafter, scheduler: TopologyScheduler | None = None) -> Engine:
    """An engine on the tiny target."""
    return Engine(TARGET, drafter, scheduler or FixedScheduler.plain(), ByteTokenizer())


def traced(
    kind: str, settings: TraceSettings, folder: Path, asked: Sequence[TracePrompt] | None = None
) -> tuple[Trace, Drafter]:
    """A trace of a drafter with random weights."""
    drafter = make_drafter(kind, TARGET, (), 4)
    asked = prompts(6) if asked is None else asked
    engine = engine_of(drafter)
    facts = trace_facts(engine, "tiny", asked, settings)
    trace = collect_trace(engine, asked, settings, facts, folder / "it.trace", lambda *_: None)
    return trace, drafter


def decoded(
    drafter: Drafter, scheduler: TopologyScheduler, sampling: SamplingParams
) -> list[GenerationResult]:
    """What the engine does with the prompts of a trace."""
    requests = [
        Request(prompt.tokens, replace(sampling, seed=derive_seed(sampling.seed or 0, number)))
        for number, prompt in enumerate(prompts(6))
    ]
    return engine_of(drafter, scheduler).run(requests)


def counts_of(result: GenerationResult) -> Counts:
    """Steps and tokens of a decoded text, its last step left out."""
    steps = result.stats.steps[:-1]
    return Counts(sum(step.num_accepted + 1 for step in steps), len(steps))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_decoding(kind: str, temperature: float, tmp_path: Path) -> None:
    """Grown trees, random ones with gaps, and random policies: the same counts for every text."""
    sampling = replace(SAMPLING, temperature=temperature)
    trace, drafter = traced(kind, TraceSettings(sampling), tmp_path)
    rng = random.Random(kind)
    trees = [tree.topology for tree in grow_all(trace, GrowParams(max_nodes=8))[-3:]]
    trees += [random_topology(rng, 24, trace.max_depth) for _ in range(5)]
    assert len({count for tree in trees for count in text_counts(trace, tree)}) > 6
    for tree in trees:
        results = decoded(drafter, FixedScheduler("it", tree), sampling)
        assert text_counts(trace, tree) == [counts_of(result) for result in results]
    for seed in range(3):
        policy = RandomScheduler(seed, trees)
        results = decoded(drafter, policy, sampling)
        replayed = replay_policy(trace, policy)
        assert list(replayed.counts) == [counts_of(result) for result in results]
        assert [list(plans) for plans in replayed.plans] == [
            [step.topology for step in result.stats.steps] for result in results
        ]
    texts = np.split(trace.tokens, trace.offsets[1:-1])
    assert [tuple(text.tolist()) for text in texts] == [result.token_ids for result in results]


def test_signals_are_those_of_decoding(tmp_path: Path) -> None:
    """Entropy and top-1 probability of every root, to the last bit of float32."""
    trace, drafter = traced("hydra", TraceSettings(SAMPLING), tmp_path)
    results = decoded(drafter, FixedScheduler.plain(), SAMPLING)
    for text, result in enumerate(results):
        rows = slice(int(trace.offsets[text]), int(trace.offsets[text + 1]) - 1)
        steps = result.stats.steps
        assert trace.entropy[rows].tolist() == [np.float32(step.entropy) for step in steps]
        assert trace.p0[rows].tolist() == [np.float32(step.p0) for step in steps]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "mtp"])
def test_codes_are_those_of_growing_the_whole_envelope(
    kind: str, temperature: float, tmp_path: Path
) -> None:
    """At every root, with the noise of decoding; no root has none. The chain is read twice."""
    sampling = replace(SAMPLING, temperature=temperature)
    trace, drafter = traced(kind, TraceSettings(sampling, depth=3, envelope=ENVELOPE), tmp_path)
    assert trace.facts.envelope == ENVELOPE.paths
    assert trace.codes.shape == (trace.num_tokens, ENVELOPE.num_nodes)
    has_root = ~np.isnan(trace.entropy)
    assert (trace.codes[~has_root] == UNSCORED).all()
    assert (trace.codes[has_root] < 64).all()
    for text, prompt in enumerate(prompts(6)):
        tokens = trace.tokens[trace.offsets[text] : trace.offsets[text + 1]].tolist()
        codes = codes_along(drafter, (*prompt.tokens, *tokens), len(prompt.tokens), text, sampling)
        assert trace.codes[trace.offsets[text] :][: len(codes)].tolist() == codes
    if not temperature:
        for depth in (1, 2, 3):
            column = ENVELOPE.paths.index((0,) * depth)
            eighths = -8 * np.log(trace.chain[has_root, depth - 1].astype(np.float32))
            assert (abs(trace.codes[has_root, column] + 0.5 - eighths.clip(0, 63.5)) < 0.6).all()


def codes_along(
    drafter: Drafter, tokens: Sequence[int], size: int, number: int, sampling: SamplingParams
) -> list[list[int]]:
    """Codes at the roots of one text, from a drafter that is led along it alone."""
    cache, rows = TARGET.new_cache(len(tokens)), torch.tensor(tokens)
    hidden = TARGET.forward([Segment(cache, rows, np.arange(len(rows)))]).hidden[0]
    noise = NoiseSource(derive_seed(sampling.seed or 0, number), VOCAB)
    state = drafter.prefill(tokens[:size], hidden[:size], tokens[size])
    found = []
    for root in range(size, len(tokens) - 1):
        coupling = Coupling(noise, sampling.temperature, root + 1) if sampling.temperature else None
        plan = GrowthPlan.whole(ENVELOPE)
        (tree,) = drafter.grow(  # type: ignore[attr-defined]
            [GrowRequest(state, tokens[root], plan, coupling)]
        )
        found.append(tree.codes[1:].tolist())
        drafter.commit(state, hidden[root : root + 1], [tokens[root + 1]])
    return found


@pytest.mark.parametrize(("kind", "depth"), [("medusa", 5), ("hydra", 5), ("mtp", None)])
def test_the_usual_envelope_goes_as_far_as_the_drafter(kind: str, depth: int | None) -> None:
    """In depth and in ranks; the eight hot tokens here do not cut it."""
    drafter = make_drafter(kind, TARGET, (), 4)
    shipped = named_topologies()["envelope24"]
    assert drafter.max_depth == depth
    assert usual_envelope(drafter) == shipped

    class Small:
        max_depth, max_width, grow = 2, 3, None

    small = usual_envelope(Small())  # type: ignore[arg-type]
    assert small == Topology.from_paths(p for p in shipped.paths if len(p) < 3 and max(p) < 3)
    assert small.num_nodes == 3 + 6
    assert usual_envelope(make_drafter("lookup", TARGET, (), 4)) == Topology(())


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_ranks_are_those_of_a_wide_tree(kind: str, tmp_path: Path) -> None:
    """At the first roots, against a draft tree wide enough to hold every hot token."""
    trace, drafter = traced(kind, TraceSettings(SAMPLING), tmp_path)
    asked = prompts(6)
    wide = Topology.from_paths([(rank,) for rank in range(drafter.max_width or 0)])
    for text, prompt in enumerate(asked):
        start = int(trace.offsets[text])
        if trace.offsets[text + 1] - start < 2:
            continue
        cache = TARGET.new_cache(64)
        rows = torch.tensor(prompt.tokens)
        hidden = TARGET.forward([Segment(cache, rows, np.arange(len(rows)))]).hidden[0]
        root, following = trace.tokens[start : start + 2].tolist()
        state = drafter.prefill(prompt.tokens, hidden, root)
        tokens = drafter.draft([DraftRequest(state, root, wide)])[0].tokens.tolist()[1:]
        rank = tokens.index(following) if following in tokens else MISS
        assert trace.ranks[start, 0] == rank


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are done are not decoded again, and the file is the same as without a break."""
    monkeypatch.setattr(collect, "GROUP", 2)
    asked, settings = prompts(7), TraceSettings(SAMPLING)
    engine = engine_of(make_drafter("hydra", TARGET, (), 4))
    facts = trace_facts(engine, "tiny", asked, settings)
    whole = collect_trace(engine, asked, settings, facts, tmp_path / "a", lambda *_: None)

    def stop(done: int, total: int) -> None:
        assert total == 7
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_trace(engine, asked, settings, facts, tmp_path / "b", stop)
    assert not (tmp_path / "b").exists()
    made: list[int] = []
    original = collect.trace_group

    def counting(*arguments: object) -> Trace:
        made.append(arguments[2])  # type: ignore[arg-type]
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "trace_group", counting)
    again = collect_trace(engine, asked, settings, facts, tmp_path / "b", lambda *_: None)
    assert made == [4, 6]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert_same(again, whole)
    collect_trace(engine, asked, settings, facts, tmp_path / "b", lambda *_: None)
    assert made == [4, 6]


def assert_same(one: Trace, other: Trace) -> None:
    """Equal in all parts; NaN is NaN."""
    assert (one.facts, one.ids, one.tasks) == (other.facts, other.ids, other.tasks)
    for name in ("tokens", "offsets", "prompt_lengths", "ranks", "entropy", "p0", "chain"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_groups_do_not_change_what_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace of one prompt at a time is that of all together."""
    (tmp_path / "x").mkdir()
    together, _ = traced("hydra++", TraceSettings(SAMPLING), tmp_path)
    monkeypatch.setattr(collect, "GROUP", 1)
    alone, _ = traced("hydra++", TraceSettings(SAMPLING), tmp_path / "x")
    for name in ("tokens", "offsets", "ranks"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(together, name))


def test_a_trace_of_other_facts_is_not_overwritten(tmp_path: Path) -> None:
    """The message names what differs."""
    traced("hydra", TraceSettings(SAMPLING), tmp_path)
    with pytest.raises(TraceError, match=r"temperature = 0\.0, not 1\.0; delete it"):
        traced("hydra", TraceSettings(replace(SAMPLING, temperature=1.0)), tmp_path)
    with pytest.raises(TraceError, match="drafter = 'hydra', not 'medusa'"):
        traced("medusa", TraceSettings(SAMPLING), tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Missing, cut short, changed by a bit, of another kind or version."""
    trace, _ = traced("hydra", TraceSettings(SAMPLING), tmp_path)
    file = tmp_path / "it.trace"
    good = file.read_bytes()
    assert_same(load_trace(file), trace)
    with pytest.raises(TraceError, match="no such file"):
        load_trace(tmp_path / "none")
    file.write_bytes(good[: len(good) // 2])
    with pytest.raises(TraceError, match="damaged"):
        load_trace(file)
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(TraceError, match="checksum"):
        load_trace(file)
    file.write_bytes(good.replace(b'schema\\": \\"3', b'schema\\": \\"9'))
    with pytest.raises(TraceError, match="schema '9'"):
        load_trace(file)
    file.write_bytes(good.replace(b'"copy_node"', b'"copy_nada"'))
    with pytest.raises(TraceError, match="lacks copy_node; make it again"):
        load_trace(file)
    file.write_bytes(good.replace(b"entmtp-trace", b"entmtp-heads"))
    with pytest.raises(TraceError, match="not a trace"):
        load_trace(file)


def test_facts_survive_a_file(tmp_path: Path) -> None:
    """Paths come back as tuples, so facts stay comparable."""
    settings = TraceSettings(SAMPLING, envelope=ENVELOPE)
    trace, _ = traced("hydra", settings, tmp_path)
    assert trace.facts.envelope == ENVELOPE.paths
    save_trace(trace, tmp_path / "again")
    assert load_trace(tmp_path / "again").facts == trace.facts
    assert TraceFacts.from_json(trace.facts.to_json()) == trace.facts


def tree(path: Sequence[int]) -> Topology:
    """A path and what is above it."""
    return Topology.from_paths(path[: depth + 1] for depth in range(len(path)))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "hydra",
            TraceSettings(SAMPLING, depth=6),
            "depth goes to depth 6; the hydra drafter to 5",
        ),
        ("medusa", TraceSettings(SAMPLING, envelope=tree([0] * 6)), "the tree is 6 deep"),
        ("lookup", TraceSettings(SAMPLING, envelope=tree([0])), "lookup drafter has no prob"),
        (
            "mtp",
            TraceSettings(SAMPLING, envelope=tree([0] * 64)),
            "an envelope has 64 nodes; it must have 1 to 63",
        ),
        ("hydra", TraceSettings(SAMPLING, envelope=tree([8])), "the tree uses child rank 8"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    kind: str, settings: TraceSettings, message: str, tmp_path: Path
) -> None:
    """Before anything is decoded."""
    with pytest.raises((InputError, TopologyError), match=message):
        traced(kind, settings, tmp_path)


def test_plain_decoding_has_nothing_to_trace(tmp_path: Path) -> None:
    """The message says what to give instead."""
    engine, asked = engine_of(EmptyDrafter()), prompts(1)
    settings = TraceSettings(SAMPLING)
    facts = trace_facts(engine, "tiny", asked, settings)
    with pytest.raises(InputError, match="name heads or lookup"):
        collect_trace(engine, asked, settings, facts, tmp_path / "x", lambda *_: None)


def test_records_are_encoded_once_each(tmp_path: Path) -> None:
    """A prompt given twice, or too long for the window, is named."""
    target = tiny_target(seed=5, context_window=512)
    drafter = make_drafter("hydra", target, (), 4)
    engine = Engine(target, drafter, FixedScheduler.plain(), ByteTokenizer())

    def trace_of(*turns: str) -> Trace:
        records = [PromptRecord(turn[:3], "a", (turn,)) for turn in turns]
        return trace_prompts(
            engine, "tiny", records, TraceSettings(SAMPLING), lambda *_: None, folder=tmp_path
        )

    with pytest.raises(InputError, match="'abc' of task 'a' occurs twice"):
        trace_of("abcd", "abcd")
    assert trace_of("abcd", "abce").num_texts == 2
    with pytest.raises(InputError, match="the context window holds 512"):
        trace_of("x" * 600)


def test_traces_that_were_not_used_for_longest_are_forgotten(tmp_path: Path) -> None:
    """Never the one in use, nor files that are no traces."""
    for number in range(5):
        file = tmp_path / f"{number}.trace"
        file.write_bytes(bytes(100))
        os.utime(file, (number, number))
    (tmp_path / "other.json").write_bytes(bytes(1000))
    forget_traces(tmp_path, tmp_path / "0.trace", max_bytes=320)
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"0.trace", "3.trace", "4.trace", "other.json"}
    forget_traces(tmp_path, tmp_path / "0.trace", max_bytes=0)
    assert {file.name for file in tmp_path.iterdir()} == {"0.trace", "other.json"}


@pytest.mark.parametrize(
    "change", [{"top_k": 3}, {"top_p": 0.5}, {"stop": ("x",)}, {"ignore_eos": True}]
)
def test_facts_tell_apart_all_that_decides_about_the_text(change: dict[str, object]) -> None:
    """A trace of other sampling must not be found again."""
    engine = engine_of(EmptyDrafter())
    facts = [
        trace_facts(engine, "tiny", prompts(2), TraceSettings(sampling))
        for sampling in (SAMPLING, replace(SAMPLING, **change))  # type: ignore[arg-type]
    ]
    assert facts[0] != facts[1]
    assert facts[0] == replace(facts[1], settings=facts[0].settings)
