"""Recorded steps write the texts of plain decoding; a tape stands for CUDA graphs."""

from dataclasses import replace

import pytest

from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult, Request
from entmtp.params import SamplingParams
from entmtp.target.cuda_graphs import ROW_COUNTS
from entmtp.target.llama import LlamaTarget
from exactness import (
    NONE,
    RandomScheduler,
    make_drafter,
    outcome,
    plain_engine,
    random_target,
)
from fakes import ByteTokenizer
from tape import TapeRecorder

PROMPTS = ((2, 7, 1, 10), (3, 1))


def decode(target: LlamaTarget, drafter: str, sampling: SamplingParams) -> list[GenerationResult]:
    """Each prompt four times: plainly and through random trees, in a batch and alone."""
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=(5,))
    plain = plain_engine(target, tokenizer)
    batch = plain.generate_batch(PROMPTS, sampling)
    texts = [(*p, *r.token_ids) for p, r in zip(PROMPTS, batch, strict=True)]
    trees = Engine(
        target,
        make_drafter(drafter, target, texts, 1),
        RandomScheduler(1),
        tokenizer,
        EngineLimits(max_batch_size=2, prefill_chunk=6, spare_rows=4),
    )
    results = batch + trees.generate_batch(PROMPTS, sampling)
    for engine in (plain, trees):
        for prompt, seed in zip(PROMPTS, [r.seed for r in batch], strict=True):
            results += engine.run([Request(prompt, replace(sampling, seed=seed))])
    return results


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("seed", "drafter"), [(0, "hydra"), (2, "half-right"), (5, "lookup")])
def test_recorded_decoding_writes_the_same_texts(
    seed: int, drafter: str, temperature: float
) -> None:
    """Plain or through changing trees, alone or in batches, greedy or sampled."""
    target = random_target(seed)
    recording = target.with_graphs(TapeRecorder())
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed)
    expected = decode(target, drafter, sampling)
    results = decode(recording, drafter, sampling)
    assert [outcome(r) for r in results] == [outcome(r) for r in expected]
    assert [outcome(r) for r in results] == [outcome(r) for r in expected[:2]] * 4
    alone = sum(result.stats.num_steps for result in results[4:])
    assert alone <= recording.graph_replays
    assert recording.graphs_captured <= len(ROW_COUNTS)


def test_a_second_text_records_nothing_new() -> None:
    """Switching among trees of known sizes is a choice of recording."""
    target = random_target(2).with_graphs(TapeRecorder())
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=())
    engine = Engine(target, make_drafter("hydra", target, (), 0), RandomScheduler(1), tokenizer)
    sampling = SamplingParams(max_new_tokens=24, seed=1, ignore_eos=True)
    engine.generate([1, 2], sampling)
    captured, replays = target.graphs_captured, target.graph_replays
    engine.generate([1, 2], sampling)
    assert captured == target.graphs_captured <= len(ROW_COUNTS)
    assert target.graph_replays == 2 * replays
    result = Engine(target, EmptyDrafter(), NONE, tokenizer).generate([1, 2], sampling)
    assert target.graph_replays == 2 * replays + result.stats.num_steps
