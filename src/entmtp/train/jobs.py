"""What the target is asked to write: first answers, then second turns of some conversations."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entmtp.errors import TrainingError
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.tokenizer import Tokenizer
from entmtp.train.config import DataConfig
from entmtp.train.prompts import Draw, draw_prompts, follow_up

__all__ = ["AnswerJob", "first_jobs", "second_jobs"]


@dataclass(frozen=True)
class AnswerJob:
    """One text that the target writes.

    Attributes:
        prompt: token ids, under the chat template.
        sampling: how the answer is chosen; its seed is set.
        group: answers of one group share a prompt, so they are held out together.
        draw: the prompt; the conversation so far is ``prompt``.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    group: int
    draw: Draw


def first_jobs(
    workloads: Sequence[str | Path],
    exclude: Sequence[str | Path],
    tokenizer: Tokenizer,
    window: int,
    config: DataConfig,
) -> list[AnswerJob]:
    """First turns, without those that leave no room to answer.

    Args:
        workloads: tasks and files of prompts.
        exclude: those whose prompts must not be answered.
        tokenizer: with a chat template.
        window: context window of the target.
        config: how many, and how long.

    Raises:
        TrainingError: there are fewer than two.
    """
    draws = draw_prompts(
        workloads, config.num_prompts, config.seed, samples=config.samples, exclude=exclude
    )
    rng = random.Random(config.seed + 1)
    groups: dict[tuple[int, ...], int] = {}
    jobs = []
    for number, draw in enumerate(draws):
        longest = config.max_new_tokens
        if rng.random() < config.long_answers:
            longest = config.long_new_tokens
        turns = [{"role": "user", "content": draw.record.turns[0]}]
        prompt = tuple(tokenizer.encode_chat(turns))
        longest = min(longest, max(window - len(prompt), config.max_new_tokens))
        if not 0 < len(prompt) <= window - longest:
            continue
        temperature = config.sample_temperature if draw.copy else config.temperature
        seed = derive_seed(config.seed, number)
        sampling = SamplingParams(max_new_tokens=longest, temperature=temperature, seed=seed)
        group = groups.setdefault(prompt, len(groups))
        jobs.append(AnswerJob(prompt, sampling, group, draw))
    if len(groups) < 2:
        raise TrainingError(
            f"{len(groups)} prompts fit the context window of {window} with "
            f"{config.max_new_tokens} new tokens; at least 2 are needed"
        )
    return jobs


def second_jobs(
    jobs: Sequence[AnswerJob],
    answers: Mapping[int, Sequence[int]],
    tokenizer: Tokenizer,
    window: int,
    config: DataConfig,
) -> list[AnswerJob]:
    """Second turns behind a share of the first answers that came to an end of their own.

    Args:
        jobs: of the first answers.
        answers: by number of the job, the tokens it gave.
        tokenizer: that decodes them.
        window: context window of the target.
        config: the share, and how long.
    """
    rng = random.Random(config.seed + 2)
    found = []
    for number, job in enumerate(jobs):
        is_chosen, turn = rng.random() < config.follow_ups, follow_up(job.draw.record.task, rng)
        answer = answers[number]
        if not is_chosen or answer[-1] not in tokenizer.eos_ids:
            continue
        turns = [
            {"role": "user", "content": job.draw.record.turns[0]},
            {"role": "assistant", "content": tokenizer.decode(answer[:-1])},
            {"role": "user", "content": turn},
        ]
        prompt = tuple(tokenizer.encode_chat(turns))
        if len(prompt) > window - config.max_new_tokens:
            continue
        sampling = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=job.sampling.temperature,
            seed=derive_seed(config.seed, len(jobs) + number),
        )
        found.append(AnswerJob(prompt, sampling, job.group, job.draw))
    return found
