"""``entmtp explain``: one prompt, step by step."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import (
    load_engine,
    model_options,
    sampling_options,
    sampling_params,
    typical_params,
)
from entmtp.errors import InputError

if TYPE_CHECKING:
    from entmtp.explain import ExplainedStep, Explanation

__all__ = ["explain"]

_COLUMNS = "step  entropy    p0  plan           class  drafted (copied)  kept      ms  text"


@click.command()
@click.option("--prompt", required=True, help="The user's turn, or the raw text with --raw.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PNG to write: entropy, draft tokens and times of each step (extra bench).",
)
@model_options()
@sampling_options
def explain(prompt: str, raw: bool, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Show what the scheduler saw and chose at every step, and what it brought.

    Entropy (nats) and p0, the largest probability, are those of the distribution that the newest
    token was drawn from; class is the policy's own class of what it saw; kept are the draft tokens
    that the model agreed with: a step emits one token more.
    """
    from entmtp.explain import explain as run
    from entmtp.explain import plot_explanation
    from entmtp.plotting import make_report_folder

    sampling, typical = sampling_params(options), typical_params(options)
    if typical is not None:
        raise InputError("explain shows exact verification only; leave out --verification")
    if plot is not None:
        make_report_folder(plot.parent)
    engine = load_engine(options, sampling.temperature)
    explanation = run(
        engine, engine.encode(prompt) if raw else engine.chat_prompt(prompt), sampling
    )
    if as_json:
        click.echo(json.dumps(_as_dict(explanation)))
    else:
        _print(explanation)
    if plot is not None:
        plot_explanation(explanation, plot)
        click.echo(f"Plot: {plot}", err=True)


def _as_dict(explanation: "Explanation") -> dict[str, Any]:
    return {
        "first": explanation.first,
        "steps": [step.as_dict() for step in explanation.steps],
        "stats": explanation.result.stats.as_dict(),
    }


def _print(explanation: "Explanation") -> None:
    stats = explanation.result.stats
    click.echo(_COLUMNS)
    click.echo(f"{'':66}{'':4}{_quoted(explanation.first)}")
    for number, step in enumerate(explanation.steps, start=1):
        click.echo(_line(number, step))
    total = sum(step.total_ms for step in explanation.steps)
    shares = ", ".join(
        f"{name} {sum(getattr(s, f'{name}_ms') for s in explanation.steps) / total:.0%}"
        for name in ("schedule", "draft", "forward", "rest")
        if total
    )
    click.echo(
        f"[{stats.num_tokens} tokens in {stats.num_steps} steps, "
        f"{stats.mean_acceptance_length:.2f} tokens a step; {stats.drafter}, {stats.policy}; "
        f"{shares or 'no steps'}]"
    )


def _line(number: int, step: "ExplainedStep") -> str:
    record = step.record
    copied = f"({record.num_copied})" if record.num_copied else ""
    return (
        f"{number:4}  {record.entropy:7.3f}  {record.p0:4.2f}  {record.topology:<13.13}  "
        f"{record.bin:5}  {record.num_nodes:7} {copied:>8}  {record.num_accepted:4}  "
        f"{step.total_ms:6.1f}  {_quoted(step.text)}"
    )


def _quoted(text: str) -> str:
    """On one line, with its spaces."""
    return json.dumps(text, ensure_ascii=False)
