"""Tokens a step and tokens/s of drafters and trees on prompt files, paired in one run.

For each prompt every configuration decodes once, in a rotating order, plain decoding included, so
that a slow spell of the machine hits all alike. Prints a table, then one JSON document.

    python benchmarks/acceptance.py --prompts prompts.jsonl --limit 20 --max-new-tokens 128 \\
        --configs none,hydra:tree16,medusa:tree16,hydra:hysteresis
"""

import argparse
import json
from pathlib import Path

import entmtp
from entmtp.loading.drafters import load_drafter
from entmtp.scheduler import POLICIES, make_scheduler
from entmtp.workload import read_prompts
from paired import Config, decode_paired, encode_prompts, provenance, summary


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
    configs = {name: Config(make_engine(base, name, args.model)) for name in names}
    records = [record for file in args.prompts for record in read_prompts(file, args.limit)]
    sampling = entmtp.SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=0
    )
    results = decode_paired(configs, encode_prompts(base, records), sampling)
    return {
        **provenance(base, records),
        "configs": {name: summary(results[name], results[names[0]]) for name in names},
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
