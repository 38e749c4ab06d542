"""What benchmarks share: decoding paired in one run, and the provenance of every number."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

import entmtp
from entmtp.workload import PromptRecord, prompts_digest


@dataclass(frozen=True)
class Config:
    """One way to decode.

    Attributes:
        engine: target, drafter and scheduler.
        typical: lossy typical acceptance; ``None`` is exact.
    """

    engine: entmtp.Engine
    typical: entmtp.TypicalParams | None = None


Results = dict[str, list[entmtp.GenerationResult]]


def decode_paired(
    configs: Mapping[str, Config],
    prompts: Sequence[tuple[int, ...]],
    sampling: entmtp.SamplingParams,
) -> Results:
    """Decode every prompt once a configuration, in a rotating order; warm-up apart.

    A slow spell of the machine thus hits all alike.
    """
    names = list(configs)
    results: Results = {name: [] for name in names}
    warm_up = entmtp.SamplingParams(max_new_tokens=8, seed=0)
    for config in configs.values():
        config.engine.generate(prompts[0], warm_up, typical=config.typical)
    for index, prompt in enumerate(prompts):
        for shift in range(len(names)):
            name = names[(index + shift) % len(names)]
            config = configs[name]
            results[name].append(config.engine.generate(prompt, sampling, typical=config.typical))
        if sys.stderr.isatty():
            print(f"\r{index + 1}/{len(prompts)} prompts", end="", file=sys.stderr)
    return results


def encode_prompts(engine: entmtp.Engine, records: Sequence[PromptRecord]) -> list[tuple[int, ...]]:
    """The first turn of each record under the chat template, or as raw text without one."""
    try:
        return [engine.chat_prompt(record.turns[0]) for record in records]
    except entmtp.EntmtpError:
        return [engine.encode(record.turns[0]) for record in records]


def summary(
    results: Sequence[entmtp.GenerationResult], base: Sequence[entmtp.GenerationResult]
) -> dict[str, object]:
    """Counts and speeds of one configuration against the first one."""
    steps = sum(r.stats.num_steps for r in results)
    accepted = sum(r.stats.num_accepted for r in results)
    speeds = [r.stats.decode_tokens_per_s for r in results]
    seconds = sum(r.stats.decode_s for r in results)
    trees: dict[str, int] = {}
    for result in results:
        for name, count in result.stats.topology_steps.items():
            trees[name] = trees.get(name, 0) + count
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "tokens_per_s": sum(r.stats.num_tokens - 1 for r in results) / seconds if seconds else 0.0,
        "tokens_per_s_median": median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "num_tokens": sum(r.stats.num_tokens for r in results),
        "num_steps": steps,
        "identical_to_first": sum(
            a.token_ids == b.token_ids for a, b in zip(results, base, strict=True)
        ),
        "verification": results[0].stats.verification,
        "topology_steps": trees,
    }


def machine() -> dict[str, object]:
    """Versions, and what the script runs on."""
    return {
        "schema": 1,
        "argv": sys.argv[1:],
        "entmtp": entmtp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def provenance(engine: entmtp.Engine, records: Sequence[PromptRecord]) -> dict[str, object]:
    """Where the numbers come from."""
    return {
        **machine(),
        "device": str(engine.target.device),
        "dtype": str(engine.target.dtype),
        "prompts": len(records),
        "prompts_digest": prompts_digest(records),
    }


def print_json(report: Mapping[str, object], file: Path | None) -> None:
    """Print a report as one JSON document, the last line; also write it to a file, whole."""
    text = json.dumps(report)
    print(text)
    if file is not None:
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, file)
