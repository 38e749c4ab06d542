"""Tokens a step and tokens/s of drafters and trees on prompt files, paired in one run.

For each prompt every configuration decodes once, in a rotating order, plain decoding included, so
that a slow spell of the machine hits all alike. Prints a table, then one JSON document.

    python benchmarks/acceptance.py --prompts prompts.jsonl --limit 20 --max-new-tokens 128 \\
        --configs none,hydra:tree16,medusa:tree16,hydra:hysteresis
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from statistics import median

import torch

import entmtp
from entmtp.loading.drafters import load_drafter
from entmtp.loading.loader import POLICIES, make_scheduler
from entmtp.workload import prompts_digest, read_prompts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--configs", default="none,hydra:tree16", help="drafter:topology or drafter:policy, ..."
    )
    return parser.parse_args()


def make_engine(base: entmtp.Engine, config: str, model: str) -> entmtp.Engine:
    """An engine on the target of ``base``."""
    name, _, tree = config.partition(":")
    drafter = load_drafter(name, base.target, model)
    is_policy = tree in POLICIES
    scheduler = make_scheduler(
        tree if is_policy else "auto", drafter, None, None if is_policy or not tree else tree
    )
    return entmtp.Engine(base.target, drafter, scheduler, base.tokenizer)


def run(args: argparse.Namespace) -> dict[str, object]:
    base = entmtp.load(args.model, "none", dtype=args.dtype, threads=args.threads)
    names = args.configs.split(",")
    engines = {name: make_engine(base, name, args.model) for name in names}
    records = [record for file in args.prompts for record in read_prompts(file, args.limit)]
    sampling = entmtp.SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=0
    )
    results: dict[str, list[entmtp.GenerationResult]] = {name: [] for name in names}
    for engine in engines.values():  # warm-up, not counted
        engine.generate(base.chat_prompt("Hello"), entmtp.SamplingParams(max_new_tokens=8))
    for index, record in enumerate(records):
        prompt = base.chat_prompt(record.turns[0])
        for shift in range(len(names)):
            name = names[(index + shift) % len(names)]
            results[name].append(engines[name].generate(prompt, sampling))
    return {
        "schema": 1,
        "argv": sys.argv[1:],
        "entmtp": entmtp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "device": str(base.target.device),
        "dtype": str(base.target.dtype),
        "threads": torch.get_num_threads(),
        "prompts": len(records),
        "prompts_digest": prompts_digest(records),
        "configs": {name: summary(results[name], results[names[0]]) for name in names},
    }


def summary(
    results: list[entmtp.GenerationResult], base: list[entmtp.GenerationResult]
) -> dict[str, object]:
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
        "tokens_per_s": sum(r.stats.num_tokens - 1 for r in results) / seconds,
        "tokens_per_s_median": median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "num_tokens": sum(r.stats.num_tokens for r in results),
        "num_steps": steps,
        "identical_to_first": sum(
            a.token_ids == b.token_ids for a, b in zip(results, base, strict=True)
        ),
        "topology_steps": trees,
    }


def main() -> None:
    report = run(parse())
    print(f"{'config':<24}{'tokens/step':>12}{'tokens/s':>10}{'speed-up':>10}{'identical':>11}")
    configs = report["configs"]
    assert isinstance(configs, dict)  # noqa: S101 - made above
    first = next(iter(configs.values()))["tokens_per_s"]
    for name, row in configs.items():
        print(
            f"{name:<24}{row['mean_acceptance_length']:>12.3f}{row['tokens_per_s']:>10.1f}"
            f"{row['tokens_per_s'] / first:>9.2f}x"
            f"{row['identical_to_first']:>6}/{report['prompts']}"
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
