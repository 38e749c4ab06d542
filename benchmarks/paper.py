"""The comparison of the paper (arXiv 2606.27550), on your model and heads, beside its numbers.

Runs plain decoding (AR), the published heads that are given on the published tree (Medusa, Hydra),
and the paper's three systems on the Hydra heads, or on the Medusa heads without any: the best
static tree (EntMTP*), the ladder (EntMTP-l) and the dead band (EntMTP-tau). For these a bank is
calibrated and fitted for each file of prompts, on a file of other prompts of its kind. Then one
``entmtp bench`` compares all, and what the paper claims is printed beside what was found.

    python benchmarks/paper.py --model lmsys/vicuna-7b-v1.3 \\
        --medusa FasterDecoding/medusa-vicuna-7b-v1.3 --hydra ankner/hydra-vicuna-7b-v1.3 \\
        --prompts humaneval.jsonl --calibration mbpp.jsonl \\
        --prompts gsm8k_test.jsonl --calibration gsm8k_train.jsonl --limit 40 --work paper

With ``--verification exact`` the texts are those of plain decoding, at any temperature.
``--verification typical`` is the published, LOSSY rule; the paper's runs take it at temperature
0.7. Banks are always fitted under exact verification, where a text does not depend on the trees.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import entmtp
from entmtp.bench.tasks import read_tasks
from entmtp.cli import cli
from entmtp.workload import read_workload

SYSTEMS = {
    "plain": "AR",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "hydra-best": "EntMTP*",
    "ladder": "EntMTP-l",
    "hysteresis": "EntMTP-tau",
}

CLAIMS = (
    ("EntMTP-tau / AR", "hysteresis/plain", "3.13 to 3.47"),
    ("EntMTP-tau / Medusa", "hysteresis/medusa", "up to 1.36"),
    ("EntMTP-tau / Hydra", "hysteresis/hydra", "1.09 to 1.15"),
    ("EntMTP-tau / EntMTP*", "hysteresis/hydra-best", "1.005 to 1.021"),
)
"""What the paper says of Vicuna-7B on one GPU, HumanEval, ShareGPT and GSM8K."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, a Hugging Face id or a name")
    parser.add_argument(
        "--medusa", help="Medusa heads: a kind, a file, a folder, a Hugging Face id"
    )
    parser.add_argument("--hydra", help="Hydra or Hydra++ heads, likewise")
    parser.add_argument("--prompts", action="append", required=True, help="to report on")
    parser.add_argument(
        "--calibration", action="append", default=[], help="to calibrate on, one for each --prompts"
    )
    parser.add_argument("--limit", type=int, help="prompts taken from each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--verification", choices=("exact", "typical"), default="exact")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-nodes", type=int, default=64, help="of the trees that are grown")
    parser.add_argument("--quick", action="store_true", help="calibrate roughly")
    parser.add_argument("--work", type=Path, default=Path("paper"), help="of banks and of the JSON")
    args = parser.parse_args(argv)
    if args.medusa is None and args.hydra is None:
        parser.error("give --medusa, --hydra or both")
    if args.calibration and len(args.calibration) != len(args.prompts):
        parser.error("give one --calibration for each --prompts, in their order, or none")
    return args


def common(args: argparse.Namespace) -> list[str]:
    """Options of calibrate and of bench."""
    given = {
        "model": args.model,
        "drafter": args.hydra or args.medusa,
        "backend": args.backend,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "limit": args.limit,
        "max-new-tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def calibration_options(args: argparse.Namespace) -> list[str]:
    """Options of calibrate, but for the prompts and the output."""
    more = ["--quick"] if args.quick else []
    return [*common(args), f"--max-nodes={args.max_nodes}", "--measure=none", *more]


def bank_file(args: argparse.Namespace, task: str, prompts: str) -> Path:
    """Of a task, named after all that decides the bank: options, prompts and this version."""
    records = read_workload(prompts, args.limit)
    texts = [[record.id, record.task, record.turns] for record in records]
    decisive = json.dumps([entmtp.__version__, calibration_options(args), texts])
    digest = hashlib.sha256(decisive.encode()).hexdigest()[:12]
    return Path(args.work) / f"{task}-{args.temperature:g}-{digest}.json"


def calibrate(args: argparse.Namespace, task: str, prompts: str) -> str:
    """The bank of a task as bench takes it; one that is in the work folder is used again."""
    bank = bank_file(args, task, prompts)
    if not bank.exists():
        print(f"calibrating {task} on {prompts}", file=sys.stderr)
        command = ["calibrate", f"--prompts={prompts}", f"--output={bank}"]
        entmtp_command([*command, *calibration_options(args)])
    return f"--bank={task}={bank}"


def compare(args: argparse.Namespace, banks: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and document of bench."""
    heads = {"medusa": args.medusa, "hydra": args.hydra}
    methods = ["plain", *(name for name, given in heads.items() if given is not None)]
    methods += ["hydra-best", "ladder", "hysteresis"] if banks else []
    file = args.work / "paper.json"
    command = ["bench", *args.prompts, *common(args), *banks, f"--methods={','.join(methods)}"]
    command += [f"--{name}-heads={given}" for name, given in heads.items() if given is not None]
    command += [f"--verification={args.verification}", f"--repeats={args.repeats}"]
    code = entmtp_command([*command, "--no-headroom", f"--json={file}"])
    return code, json.loads(file.read_text(encoding="utf-8"))


def entmtp_command(arguments: Sequence[str]) -> int:
    """Run a command of entmtp in this process; its errors are raised."""
    try:
        cli.main(args=list(arguments), prog_name="entmtp", standalone_mode=False)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def print_table(document: dict[str, Any]) -> None:
    """The systems by their names in the paper, then its claims beside what was found."""
    results = document["results"]
    tasks = list(results)
    print(f"\n{'tokens/s (tokens/step)':<24}" + "".join(f"{task:>22}" for task in tasks))
    for method, title in SYSTEMS.items():
        found = [results[task].get(method) for task in tasks]
        if any(found):
            print(f"{title:<24}" + "".join(f"{speed(one):>22}" for one in found))
    print(f"\n{'ratio of tokens/s':<24}{'paper':>14}" + "".join(f"{task:>24}" for task in tasks))
    for title, pair, claim in CLAIMS:
        ratios = [document["ratios"][task].get(pair) for task in tasks]
        if any(ratios):
            print(f"{title:<24}{claim:>14}" + "".join(f"{ratio(one):>24}" for one in ratios))
    last = next(m for m in reversed(SYSTEMS) if m in results[tasks[0]])
    found = [results[task][last] for task in tasks]
    choosing = [f"{one['split_ms']['schedule']:.3f}" if one["split_ms"] else "-" for one in found]
    print(f"{'choosing a tree, ms':<24}{'below 0.1':>14}" + "".join(f"{ms:>24}" for ms in choosing))
    gaps = [f"{one['gap_nats']:+.4f}" for one in found]
    print(f"{'perplexity gap, nats':<24}{'within 0.02':>14}" + "".join(f"{g:>24}" for g in gaps))
    print("The paper: Vicuna-7B on one GPU, typical acceptance at temperature 0.7. EntMTP-tau has")
    print("124.7 tokens/s on HumanEval (1.140 of Hydra) and 117.5 on ShareGPT (1.078) there.")


def speed(one: dict[str, Any] | None) -> str:
    return (
        "-" if one is None else f"{one['tokens_per_s']:.1f} ({one['mean_acceptance_length']:.2f})"
    )


def ratio(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    ends = one["ci95"]
    return f"{one['median']:.3f}" + ("" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]")


def run(args: argparse.Namespace) -> int:
    args.work.mkdir(parents=True, exist_ok=True)
    tasks = list(read_tasks(args.prompts, args.limit))
    read_tasks(dict.fromkeys(args.calibration), args.limit)
    banks = [
        calibrate(args, task, prompts)
        for task, prompts in zip(tasks, args.calibration, strict=False)
    ]
    code, document = compare(args, banks)
    print_table(document)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run(args)
    except (entmtp.EntmtpError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
