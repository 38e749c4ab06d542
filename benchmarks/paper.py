"""The comparison of the paper, on your model: plain decoding, Medusa and Hydra on one fixed tree.

Runs plain decoding and the published heads that are given, all with the tree mc_sim_7b_63, on
prompt files, paired in one run. Prints tokens/s, tokens a step and the perplexity gap: by how
many nats the mean negative log-likelihood of the text under the target differs from that of the
plain text. Then one JSON document.

    python benchmarks/paper.py --model lmsys/vicuna-7b-v1.3 \\
        --medusa FasterDecoding/medusa-vicuna-7b-v1.3 --hydra ankner/hydra-vicuna-7b-v1.3 \\
        --prompts humaneval.jsonl --limit 20

With ``--verification exact`` the texts are those of plain decoding, at any temperature, and the
gap is that of rounding alone. ``--verification typical`` is the published, LOSSY rule.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import entmtp
from entmtp.loading.drafters import load_drafter
from entmtp.scheduler import make_scheduler
from entmtp.target.base import Segment, Target
from entmtp.workload import read_prompts
from paired import Config, decode_paired, encode_prompts, print_json, provenance, summary

TREE = "mc_sim_7b_63"
CHUNK = 256


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, a Hugging Face id or a name")
    parser.add_argument("--medusa", help="Medusa heads: a file, a folder, a Hugging Face id")
    parser.add_argument("--hydra", help="Hydra or Hydra++ heads, likewise")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--limit", type=int, help="prompts taken from each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--verification", choices=("exact", "typical"), default="exact")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="also write the JSON document to this file")
    args = parser.parse_args(argv)
    if args.medusa is None and args.hydra is None:
        parser.error("give --medusa, --hydra or both")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json}: give a file in a folder that is there")
    return args


def make_configs(args: argparse.Namespace, plain: entmtp.Engine) -> dict[str, Config]:
    """Plain decoding, and each set of heads on the published tree."""
    typical = entmtp.TypicalParams() if args.verification == "typical" else None
    configs = {"plain": Config(plain)}
    for name in ("medusa", "hydra"):
        heads = getattr(args, name)
        if heads is not None:
            drafter = load_drafter(heads, plain.target, args.model)
            scheduler = make_scheduler("fixed", drafter, None, TREE)
            engine = entmtp.Engine(plain.target, drafter, scheduler, plain.tokenizer)
            configs[f"{name} ({drafter.name})"] = Config(engine, typical)
    return configs


@torch.inference_mode()
def mean_nll(target: Target, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Mean negative log-likelihood of a text after a prompt, nats a token, at temperature 1."""
    tokens = torch.tensor([*prompt, *text])
    cache = target.new_cache(len(tokens))
    total = 0.0
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        depths = np.arange(len(chunk), dtype=np.int64)
        (logits,) = target.forward([Segment(cache, chunk, depths)]).logits
        cache.commit(range(len(chunk)))
        following = tokens[start + 1 : start + 1 + len(chunk)].to(logits.device)
        nll = -torch.log_softmax(logits.float(), dim=-1).gather(1, following[:, None]).squeeze(1)
        first = max(0, len(prompt) - 1 - start)  # rows before it predict the prompt
        total += float(nll[first:].double().sum())
    return total / len(text)


def perplexities(
    engine: entmtp.Engine,
    prompts: Sequence[tuple[int, ...]],
    results: Sequence[entmtp.GenerationResult],
) -> float:
    """Mean over all tokens of all texts, nats."""
    sums = [
        mean_nll(engine.target, prompt, result.token_ids) * len(result.token_ids)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return math.fsum(sums) / sum(len(result.token_ids) for result in results)


def run(args: argparse.Namespace) -> dict[str, object]:
    plain = entmtp.load(
        args.model, "none", dtype=args.dtype, device=args.device, threads=args.threads
    )
    records = [record for file in args.prompts for record in read_prompts(file, args.limit)]
    prompts = encode_prompts(plain, records)
    configs = make_configs(args, plain)
    sampling = entmtp.SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    results = decode_paired(configs, prompts, sampling)
    rows: dict[str, dict[str, object]] = {}
    base_nll = perplexities(plain, prompts, results["plain"])
    for name, texts in results.items():
        nll = perplexities(plain, prompts, texts)
        rows[name] = summary(texts, results["plain"]) | {
            "nll_nats": nll,
            "perplexity_gap_nats": nll - base_nll,
        }
    return {
        **provenance(plain, records),
        "model": args.model,
        "tree": TREE,
        "verification": args.verification,
        "temperature": args.temperature,
        "configs": rows,
    }


def print_table(report: dict[str, object]) -> None:
    rows = report["configs"]
    assert isinstance(rows, dict)  # noqa: S101 - made by run
    if report["verification"] == "typical":
        print("typical acceptance is LOSSY: the texts are no longer those of the model alone")
    head = ("tokens/s", "speed-up", "tokens/step", "identical", "gap (nats)")
    print(f"{'system':<20}" + "".join(f"{text:>13}" for text in head))
    first = rows["plain"]["tokens_per_s"] or math.nan  # texts of one token have no decode time
    for name, row in rows.items():
        same = f"{row['identical_to_first']}/{report['prompts']}"
        print(
            f"{name:<20}{row['tokens_per_s']:>13.1f}{row['tokens_per_s'] / first:>12.2f}x"
            f"{row['mean_acceptance_length']:>13.3f}{same:>13}{row['perplexity_gap_nats']:>13.4f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        report = run(args)
    except entmtp.EntmtpError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print_table(report)
    print_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
