"""Every policy on a trace, by replay: fitted to one half of the texts, reported on the other.

    python benchmarks/policies.py it.trace --bank mixed.json
    python benchmarks/policies.py it.trace --rows 1,2,4,8,16 --forward-ms 10.8,11.3,12.6,18.5,33.9
    python benchmarks/policies.py it.trace --roofline 14,2000,250,1 --max-nodes 63 \
        --topology mc_sim_7b_63

Costs come from a calibrated bank, are given, or are projected: a forward then takes a fixed time
and the longer of reading the weights once and computing two operations a 2-byte weight and row.
For each task and for all texts: tokens/s, over those of the best single tree of the fitting half,
and the share of the way from it to the clairvoyant bound. Below are ladders on signals that cost
passes of the heads, charged for these, and as if they were free. With --each-task every task is
fitted alone. A --topology is one more tree for all steps, cut to the depth of the heads.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entmtp.bank import load_bank
from entmtp.calibrate.fit import fit_entries, mean_context
from entmtp.calibrate.fit_levels import best_single, fit_ladder, ladders
from entmtp.calibrate.fit_policies import BOUND, fit_policies, policy_rates
from entmtp.calibrate.paid import chain_passes, paid_signal
from entmtp.calibrate.pareto import predicted_rate
from entmtp.calibrate.simulate import Texts, simulate
from entmtp.calibrate.summary import shorten
from entmtp.calibrate.trace import Trace, load_trace
from entmtp.costs import CostTable
from entmtp.errors import BankError, EntmtpError
from entmtp.topology import Topology, load_topology
from paired import machine, print_json

PAID_DEPTHS = (1, 2, 4)


def numbers(text: str) -> tuple[float, ...]:
    """Positive numbers between commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from error
    if not all(0 < one < float("inf") for one in found):
        raise argparse.ArgumentTypeError(f"{text!r}: all numbers must be above 0 and finite")
    return found


def roofline(text: str) -> tuple[float, ...]:
    """Four of them."""
    found = numbers(text)
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(found)} numbers; it takes 4")
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--bank", help="whose costs are used")
    parser.add_argument("--rows", type=numbers, default="1,2,4,8,16,32")
    parser.add_argument("--forward-ms", type=numbers, default="10.8,11.3,12.6,18.5,33.9,62.8")
    parser.add_argument("--rest-ms", type=float, default=0.15)
    parser.add_argument("--draft-ms", type=float, default=0.5, help="a depth")
    parser.add_argument("--draft-row-ms", type=float, default=0.12, help="a further row")
    parser.add_argument(
        "--roofline",
        type=roofline,
        metavar="GB,GB/s,TFLOPS,MS",
        help="weights, memory, arithmetic, fixed time",
    )
    parser.add_argument("--max-nodes", type=int, default=32)
    parser.add_argument("--topology", action="append", default=[], help="a shipped name or a file")
    parser.add_argument("--each-task", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if len(arguments.rows) != len(arguments.forward_ms):
        parser.error(
            f"--rows has {len(arguments.rows)} numbers, --forward-ms {len(arguments.forward_ms)}"
        )
    return arguments


def cost_table(arguments: argparse.Namespace, depth: int) -> CostTable:
    if arguments.bank:
        calibration = load_bank(arguments.bank).calibration
        if calibration is None:
            raise BankError(f"{arguments.bank} is not calibrated")
        return calibration.costs
    rows = tuple(int(n) for n in arguments.rows)
    forward = arguments.forward_ms
    if arguments.roofline:
        rows = (*range(1, arguments.max_nodes + 2),)
        forward = tuple(roofline_ms(arguments.roofline, n) for n in rows)
    return CostTable(
        rows,
        (128,),
        (1,),
        ((forward,),),
        ((arguments.rest_ms,) * len(rows),),
        (arguments.draft_ms,) * depth,
        (arguments.draft_row_ms,) * depth,
    )


def roofline_ms(machine_numbers: Sequence[float], num_rows: int) -> float:
    """Milliseconds of a forward over so many rows, as the roofline has it."""
    gigabytes, per_s, tera, fixed_ms = machine_numbers
    read_ms = 1e3 * gigabytes / per_s
    compute_ms = gigabytes * num_rows / tera  # a weight of two bytes takes two operations a row
    return fixed_ms + max(read_ms, compute_ms)


def paid_names(trace: Trace) -> list[str]:
    """Signals that cost passes of the heads, as deep as these go."""
    depths = [depth for depth in PAID_DEPTHS if depth <= trace.max_depth]
    return [*(f"path_value@{depth}" for depth in depths), "expected_length"]


def paid_texts(
    trace: Trace, trees: list[Topology], costs: CostTable, name: str, *, is_charged: bool
) -> Texts:
    """Texts whose ``p0`` is a paid signal; a step costs its tree and what of the chain it lacks."""
    texts = Texts(trace, trees, costs, mean_context(trace))
    texts.p0 = paid_signal(trace, name)
    chain = Topology.chain(chain_passes(trace, name))
    for at, tree in enumerate(trees):
        both = Topology.from_paths({*tree.paths, *chain.paths})
        if is_charged:
            texts.ms[at] += costs.draft(both) - costs.draft(tree)
    return texts


def paid_rates(
    fitting: Trace, check: Trace, trees: list[Topology], costs: CostTable, name: str
) -> dict[str, float]:
    """Tokens a second on the check half of the best ladder on a paid signal."""
    found = {}
    for label, is_charged in (("charged", True), ("free", False)):
        texts = paid_texts(fitting, trees, costs, name, is_charged=is_charged)
        single = best_single(texts, range(len(trees)))
        made = [one for one in ladders(texts, range(len(trees)), single) if one.signal == "p0"]
        ladder, _ = fit_ladder(texts, made, single)
        other = paid_texts(check, trees, costs, name, is_charged=is_charged)
        ms = simulate(other, [single if ladder is None else ladder.automaton])
        found[label] = 1000 * other.num_tokens / float(ms[0])
    return found


def report(title: str, rates: Mapping[str, float], paid: Mapping[str, Mapping[str, float]]) -> Any:
    fixed, bound = rates["fixed"], rates[BOUND]
    rows = dict(rates)
    rows |= {f"paid {name}, {how}": r for name, one in paid.items() for how, r in one.items()}
    print(f"\n{title:<32}{'tokens/s':>10}{'/ static':>10}{'share':>8}")
    for name, rate in rows.items():
        share = (rate - fixed) / (bound - fixed) if bound > fixed else math.nan
        print(f"{name:<32}{rate:>10.1f}{rate / fixed:>10.3f}{share:>8.2f}")
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by task and policy."""
    whole = shorten(load_trace(arguments.trace))
    costs = cost_table(arguments, whole.max_depth)
    singles = {name: load_topology(name).truncate(whole.max_depth) for name in arguments.topology}
    groups = whole.by_task() if arguments.each_task else {"all": whole}
    results = {}
    for group, trace in groups.items():
        entries, _ = fit_entries(trace, costs, arguments.max_nodes)
        fitting, check = trace.halves()
        policies = fit_policies(trace, entries, costs, mean_context(fitting))
        trees = list(dict.fromkeys(entries.values()))
        paid = {name: paid_rates(fitting, check, trees, costs, name) for name in paid_names(whole)}
        parts = check.by_task() if len(set(check.tasks)) > 1 else {}
        for title, part in (*parts.items(), (group, check)):
            rates = policy_rates(part, entries, policies, costs, mean_context(part))
            rates |= {name: predicted_rate(part, tree, costs) for name, tree in singles.items()}
            results[title] = report(title, rates, paid if title == group else {})
    return results


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        results = run(arguments)
    except EntmtpError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print_json({**machine(), "trace": str(arguments.trace), "results": results}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
