"""How near the probe of a bank comes to a full timing, in several processes.

One program lands in another regime of memory from process to process. Each process loads the bank,
whose costs the probe of about a second scales, and then times the sizes of its entries, and some
more, in full; compared are whole steps. Prints a table, then one JSON document.

    python benchmarks/probe.py mixed --processes 5
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import entmtp
from entmtp.bank import Bank, load_bank
from entmtp.calibrate.adapt import adapt_bank
from entmtp.calibrate.places import filler_tokens
from entmtp.calibrate.timing import TimingParams, time_steps
from entmtp.topology import Topology
from paired import machine, print_json

LIMIT = 0.1
"""Share by which a step may differ."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bank", help="name or file")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def sizes(bank: Bank) -> dict[str, Topology]:
    """Entries of the bank, and chains."""
    depth = max(tree.max_depth for tree in bank.entries.values())
    chains = {f"chain{n}": Topology.chain(n) for n in range(1, depth + 1)}
    return {**bank.entries, **chains}


def compare_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of steps in this process: as the bank has them, probed, and timed in full."""
    engine = entmtp.load(
        arguments.model, heads=arguments.heads, backend=arguments.backend, policy="plain"
    )
    bank = load_bank(arguments.bank)
    probed = adapt_bank(bank, engine).calibration
    if bank.calibration is None or probed is None:
        raise SystemExit(f"{arguments.bank} is not calibrated")
    context = bank.calibration.costs.contexts[0]
    trees = sizes(bank)
    params = TimingParams(contexts=(context,), batches=(1,), max_rounds=60, seconds=20.0)
    full = time_steps(engine, list(trees.values()), filler_tokens(engine), params)
    tables = {"bank": bank.calibration.costs, "probe": probed.costs, "full": full}
    return {
        name: {kind: table.step_ms(tree, context) for kind, table in tables.items()}
        for name, tree in trees.items()
    }


def main() -> None:
    arguments = parse()
    if arguments.one:
        json.dump(compare_here(arguments), sys.stdout)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--one"]
    runs = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(arguments.processes)
    ]
    print(
        f"{'process':>8}{'plain step, ms':>16}{'bank off by':>13}{'probe off by':>14}  worst entry"
    )
    for number, run in enumerate(runs, start=1):
        off = {
            kind: {name: ms[kind] / ms["full"] - 1 for name, ms in run.items()}
            for kind in ("bank", "probe")
        }
        worst = max(off["probe"], key=lambda name: abs(off["probe"][name]))
        typical = median(abs(share) for share in off["bank"].values())
        print(
            f"{number:>7}{run['none']['full']:>16.2f}{100 * typical:>12.1f}%"
            f"{100 * median(abs(s) for s in off['probe'].values()):>13.1f}%  "
            f"{worst} {100 * off['probe'][worst]:+.1f}%"
        )
    within = all(abs(ms["probe"] / ms["full"] - 1) <= LIMIT for run in runs for ms in run.values())
    print(f"all within {100 * LIMIT:.0f} %: {'yes' if within else 'no'}\n")
    print_json(
        {"machine": machine(), "bank": arguments.bank, "runs": runs, "within": within},
        arguments.json,
    )


if __name__ == "__main__":
    main()
