"""Microseconds of a step that policies take to choose a tree, over those of one fixed tree.

Every policy of a bank decodes the same prompts, one at a time, in a rotating order. What is timed
is all that precedes the draft: the signal, the decision, and the cut to what may still be emitted.
A switch is a step with another decision than the step before. The search for a copy, which is part
of the draft where a plan can hold one, is shown beside it. Prints a table, then one JSON document.

    python benchmarks/schedule_cost.py mixed.json --prompts code --prompts chat --limit 3
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

import entmtp
from entmtp.bank import Bank, load_bank
from entmtp.calibrate.adapt import adapt_bank
from entmtp.engine import StepTimes
from entmtp.engine.sequence import ActiveSequence
from entmtp.growth import Copy, GrowthPlan
from entmtp.loading.catalog import home
from entmtp.scheduler import POLICIES, TopologyScheduler, make_scheduler
from entmtp.scheduler.registry import GROWING
from entmtp.workload import read_workload
from paired import encode_prompts, print_json, provenance

HIGH = 95
"""The high percentile that is shown."""


@dataclass(frozen=True)
class Timed:
    """One step.

    Attributes:
        us: microseconds before the draft.
        is_switch: whether the decision is another than that of the step before.
        search_us: microseconds of the search for a copy; ``None`` where there was none.
    """

    us: float
    is_switch: bool
    search_us: float | None = None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bank", help="name or file")
    parser.add_argument("--prompts", action="append", help="task or file; default: code")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="also write the JSON document to this file")
    return parser.parse_args(argv)


def schedulers_of(bank: Bank, engine: entmtp.Engine) -> dict[str, TopologyScheduler]:
    """``fixed``, then every fitted policy that goes with the drafter."""
    fitted = bank.calibration.policies if bank.calibration is not None else {}
    can_grow = hasattr(engine.drafter, "grow")
    names = [name for name in POLICIES if name in fitted and (can_grow or name not in GROWING)]
    names = ["fixed", *(name for name in names if name not in ("fixed", "plain"))]
    return {name: make_scheduler(name, engine.drafter, bank) for name in names}


def time_schedulers(
    engine: entmtp.Engine,
    schedulers: Mapping[str, TopologyScheduler],
    prompts: Sequence[tuple[int, ...]],
    sampling: entmtp.SamplingParams,
) -> dict[str, list[Timed]]:
    """All steps of every policy; before the first prompt each decodes it once untimed."""
    names = list(schedulers)
    found: dict[str, list[Timed]] = {name: [] for name in names}
    for scheduler in schedulers.values():
        engine.generate(prompts[0], sampling, scheduler=scheduler)
    for index, prompt in enumerate(prompts):
        for shift in range(len(names)):
            name = names[(index + shift) % len(names)]
            found[name] += _timed(engine, schedulers[name], prompt, sampling)
    return found


def _timed(
    engine: entmtp.Engine,
    scheduler: TopologyScheduler,
    prompt: tuple[int, ...],
    sampling: entmtp.SamplingParams,
) -> list[Timed]:
    times: list[StepTimes] = []
    engine.times_observer = times.append
    try:
        with _searches() as searches:
            result = engine.generate(prompt, sampling, scheduler=scheduler)
    finally:
        engine.times_observer = None
    decisions = [(step.topology, step.bin) for step in result.stats.steps]
    decoding = [1e6 * step.schedule_s for step in times if step.num_decoding]
    switches = [a != b for a, b in pairwise([*decisions[:1], *decisions])]
    found = searches or [None] * len(decoding)
    return [Timed(*step) for step in zip(decoding, switches, found, strict=True)]


@contextmanager
def _searches() -> Iterator[list[float | None]]:
    """Microseconds of every search for a copy while this is open."""
    found: list[float | None] = []
    search = ActiveSequence.find_copy

    def timed(sequence: ActiveSequence, plan: GrowthPlan) -> Copy | None:
        if plan.rule.copies is None:
            return None
        start = time.perf_counter()
        copy = search(sequence, plan)
        found.append(1e6 * (time.perf_counter() - start))
        return copy

    ActiveSequence.find_copy = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ActiveSequence.find_copy = search  # type: ignore[method-assign]


def summary(steps: Sequence[Timed], base_us: float) -> dict[str, float | int | None]:
    """Of one policy, beside the median of ``fixed``."""
    every = [step.us for step in steps]
    switching = [step.us for step in steps if step.is_switch]
    searches = [step.search_us for step in steps if step.search_us is not None]
    return {
        "num_steps": len(steps),
        "num_switches": len(switching),
        "median_us": median(every),
        "over_fixed_us": median(every) - base_us,
        "at_switches_over_fixed_us": median(switching) - base_us if switching else None,
        "high_us": float(np.percentile(every, HIGH)),
        "search_us": median(searches) if searches else None,
    }


def run(args: argparse.Namespace) -> dict[str, object]:
    engine = entmtp.load(
        args.model, args.heads, policy="plain", backend=args.backend, threads=args.threads
    )
    bank = adapt_bank(load_bank(args.bank), engine, home() / "banks")
    names = args.prompts or ["code"]
    records = [record for name in names for record in read_workload(name, args.limit)]
    sampling = entmtp.SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=0
    )
    prompts = encode_prompts(engine, records)
    steps = time_schedulers(engine, schedulers_of(bank, engine), prompts, sampling)
    base_us = median(step.us for step in steps["fixed"])
    return {
        **provenance(engine, records),
        "backend": engine.target.backend,
        "drafter": engine.drafter.name,
        "bank": args.bank,
        "policies": {name: summary(timed, base_us) for name, timed in steps.items()},
    }


def print_table(policies: Mapping[str, Mapping[str, float | None]]) -> None:
    print(f"microseconds before the draft: median, over fixed, at switches, {HIGH} % percentile")
    print("and of the search for a copy, which is part of the draft")
    titles = ("us", "over", "switch", "high", "search")
    print(f"{'policy':<16}{'steps':>7}{'switches':>9}" + "".join(f"{title:>8}" for title in titles))
    for name, row in policies.items():
        at, search = row["at_switches_over_fixed_us"], row["search_us"]
        print(
            f"{name:<16}{row['num_steps']:>7}{row['num_switches']:>9}{row['median_us']:>8.1f}"
            f"{row['over_fixed_us']:>8.1f}{'-' if at is None else f'{at:.1f}':>8}"
            f"{row['high_us']:>8.1f}{'-' if search is None else f'{search:.1f}':>8}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        report = run(args)
    except entmtp.EntmtpError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print_table(report["policies"])  # type: ignore[arg-type]
    print_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
