"""What ``entmtp heads evaluate`` does with a loaded engine: trace, score, print, draw."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.provenance import machine_facts
from entmtp.commands.trace import show_progress
from entmtp.errors import InputError
from entmtp.plotting import make_report_folder

if TYPE_CHECKING:
    from entmtp.calibrate.evaluate import TaskScore
    from entmtp.calibrate.trace import Trace
    from entmtp.engine import Engine
    from entmtp.params import SamplingParams
    from entmtp.workload import PromptRecord

__all__ = ["evaluate_drafter"]


def evaluate_drafter(
    engine: "Engine",
    model: str,
    records: "Sequence[PromptRecord]",
    sampling: "SamplingParams",
    file: Path | None,
    score: Any,
    report: Path | None,
    as_json: bool,
) -> None:
    """Trace the prompts, grow and score trees, print.

    Args:
        engine: its drafter is evaluated.
        model: its name.
        records: prompts.
        sampling: of the texts.
        file: where the trace goes; ``None``: among the program's own files.
        score: ``joint`` or ``own``.
        report: folder for plots, or ``None``.
        as_json: print one JSON object instead of tables.
    """
    from entmtp.calibrate.collect import TraceSettings
    from entmtp.calibrate.evaluate import BUDGETS, evaluate_heads
    from entmtp.calibrate.grow import GrowParams
    from entmtp.calibrate.plots import plot_scores
    from entmtp.calibrate.session import trace_prompts
    from entmtp.loading.catalog import home

    if report is not None:
        make_report_folder(report)
    _check_tasks(records)
    trace = trace_prompts(
        engine,
        model,
        records,
        TraceSettings(sampling),
        lambda done, total: show_progress("prompts", done, total),
        output=file,
        folder=home() / "traces",
    )
    params = GrowParams(max_nodes=BUDGETS[-1], score=score)
    overall, tasks = evaluate_heads(trace, params, show_progress)
    facts = _facts(trace, score)
    if report is not None:
        facts["plots"] = [str(path) for path in plot_scores(tasks, report)]
    if as_json:
        found = {task: one.as_dict() for task, one in tasks.items()}
        click.echo(json.dumps({**facts, **overall.as_dict(), "tasks": found}, allow_nan=False))
    else:
        _print(facts, overall, tasks)


def _check_tasks(records: "Sequence[PromptRecord]") -> None:
    """Refuse a task of one prompt before anything is decoded."""
    counts = Counter(record.task for record in records)
    for task, count in counts.items():
        if count < 2:
            raise InputError(
                f"task {task!r} has one prompt; trees are grown on one half of the prompts and "
                "scored on the other, so give at least two"
            )


def _facts(trace: "Trace", score: str) -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        **machine_facts(),
        **trace.facts.__dict__,
        "score": score,
        "num_texts": trace.num_texts,
        "num_tokens_traced": trace.num_tokens,
    }


def _print(facts: dict[str, Any], overall: "TaskScore", tasks: "dict[str, TaskScore]") -> None:
    rows = dict(tasks) if len(tasks) == 1 else {**tasks, "all": overall}
    budgets = [budget.nodes for budget in overall.budgets]
    click.echo(
        f"{facts['drafter']} on {facts['model']}: {facts['num_texts']} texts, "
        f"{facts['num_tokens_traced']} tokens; scored on the half that trees were not grown on"
    )
    click.echo("\ntokens a step, by nodes of the tree")
    click.echo(
        f"{'task':<12}" + "".join(f"{nodes:>8}" for nodes in budgets) + f"{'95 % at 16':>16}"
    )
    for task, one in rows.items():
        cells = "".join(f"{budget.mean_acceptance_length:>8.2f}" for budget in one.budgets)
        interval = "-" if one.ci95 is None else "{:.2f}-{:.2f}".format(*one.ci95)
        click.echo(f"{task:<12}{cells}{interval:>16}")
    click.echo("\nshare of true tokens among a head's first 1 / 2 / 4 / 8, given the true path")
    for task, one in rows.items():
        shares = [" ".join(_share(value) for value in head.values()) for head in one.heads]
        click.echo(f"{task:<12}" + "".join(f"{share:>24}" for share in shares))
    click.echo("\ndepth kept where the depth above is (best tree of at most 16 nodes)")
    for task, one in rows.items():
        depths = [_share(share) for share in one.depths]
        click.echo(f"{task:<12}" + "".join(f"{cell:>8}" for cell in depths))
    _print_bins("tokens a step by position in the text", rows, "by_position")
    _print_bins("tokens a step by the target's entropy at the root, nats", rows, "by_entropy")
    click.echo("\nentropy, top-1 probability of the target; optimism of the joint score")
    for task, one in rows.items():
        click.echo(
            f"{task:<12}{one.mean_entropy:>8.2f}{one.mean_p0:>8.2f}{100 * one.optimism:>9.1f} %"
        )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _print_bins(title: str, rows: "dict[str, TaskScore]", field: str) -> None:
    first = getattr(next(iter(rows.values())), field)
    click.echo(f"\n{title}")
    click.echo(f"{'from':<12}" + "".join(f"{bin_.low:>8g}" for bin_ in first))
    for task, one in rows.items():
        values = [bin_.mean_acceptance_length for bin_ in getattr(one, field)]
        cells = [_share(value) for value in values]
        click.echo(f"{task:<12}" + "".join(f"{cell:>8}" for cell in cells))
