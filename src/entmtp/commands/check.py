"""``entmtp check``: is the output the same as plain decoding's?"""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import (
    integer_list,
    load_engine,
    model_options,
    prompts_option,
    read_records,
)

if TYPE_CHECKING:
    from entmtp.check import CheckReport

__all__ = ["check"]


@click.command()
@prompts_option()
@click.option("--limit", type=int, default=None, help="Prompts taken from each task or file.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--batch-sizes", default="1", show_default=True, callback=integer_list)
@click.option(
    "--threads", default=None, callback=integer_list, help="CPU threads of torch, such as 1,2."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options(trees=False)
def check(
    workloads: tuple[str, ...],
    limit: int | None,
    max_new_tokens: int,
    **options: Any,
) -> None:
    """Compare plain decoding with random trees at every step, greedy and sampled.

    Exit code 1 means that a difference was found which rounding cannot explain.
    """
    as_json, seed = options.pop("as_json"), options.pop("seed")
    batch_sizes, threads = options.pop("batch_sizes"), options.pop("threads")
    records = read_records(workloads, limit)
    engine = load_engine(options)

    from entmtp.check import run_check

    report = run_check(
        engine,
        [(record.id, engine.chat_prompt(record.turns[0])) for record in records],
        max_new_tokens=max_new_tokens,
        batch_sizes=batch_sizes,
        threads=threads,
        seed=seed,
        progress=_progress,
    )
    _print(report, as_json)
    if report.bugs:
        raise SystemExit(1)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done}/{total} cases", nl=done == total, err=True)


def _print(report: "CheckReport", as_json: bool) -> None:
    facts = report.as_dict()
    if as_json:
        click.echo(json.dumps(facts))
        return
    mismatches = facts.pop("mismatches")
    for key, value in facts.items():
        click.echo(f"{key}: {value}")
    assert isinstance(mismatches, list)  # noqa: S101 - made by as_dict
    for mismatch in mismatches:
        click.echo(json.dumps(mismatch))
