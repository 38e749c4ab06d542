"""``entmtp trace``: decode prompts once and write what calibration must know of them."""

import sys
from pathlib import Path
from typing import Any

import click

from entmtp.commands.options import load_engine, model_options, prompts_option, read_records
from entmtp.params import SamplingParams

__all__ = ["prompt_options", "show_progress", "trace"]


def prompt_options(function: Any) -> Any:
    """Options of a workload: tasks and files, how many prompts, and how long the texts get."""
    for option in (
        click.option("--max-new-tokens", type=int, default=256, show_default=True),
        click.option(
            "--limit", type=int, default=None, help="Prompts taken from each task or file."
        ),
        prompts_option(),
    ):
        function = option(function)
    return function


def show_progress(what: str, done: int, total: int) -> None:
    """One line that is written over, where someone is looking."""
    if sys.stderr.isatty():
        click.echo(f"\r{what}: {done}/{total}", nl=done == total, err=True)


@click.command()
@prompt_options
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="File that is written."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--depth", type=click.IntRange(1, 64), default=None, help="How deep ranks go.")
@click.option(
    "--envelope",
    default="none",
    show_default=True,
    metavar="NAME|FILE",
    help="Also trace the probabilities of all nodes of this tree, for trees that are grown step by "
    "step: envelope24, another shipped tree, or a JSON list of paths.",
)
@click.option(
    "--coupled/--uncoupled",
    default=True,
    show_default=True,
    help="Rank children with the noise of sampling, as decoding does.",
)
@click.option("--threads", type=int, default=None, help="CPU threads.")
@model_options(trees=False)
def trace(
    workloads: tuple[str, ...],
    limit: int | None,
    max_new_tokens: int,
    output: Path,
    **options: Any,
) -> None:
    """Decode prompts once; write the ranks of every token among the drafter's proposals.

    Trees and policies are replayed from the file without a model. A run that was stopped goes on
    where it was when it is given again.
    """
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=options.pop("temperature"),
        seed=options.pop("seed"),
    )
    from entmtp.topology import load_topology

    depth, envelope = options.pop("depth"), load_topology(options.pop("envelope"))
    is_coupled = options.pop("coupled")
    records = read_records(workloads, limit)
    engine = load_engine(options)

    from entmtp.calibrate.collect import TraceSettings
    from entmtp.calibrate.session import trace_prompts

    made = trace_prompts(
        engine,
        options["model"],
        records,
        TraceSettings(sampling, depth, envelope, is_coupled),
        lambda done, total: show_progress("prompts", done, total),
        output=output,
    )
    size = output.stat().st_size / 1e6
    click.echo(
        f"{output}: {made.num_texts} texts, {made.num_tokens} tokens, {made.facts.drafter}, "
        f"{size:.1f} MB"
    )
