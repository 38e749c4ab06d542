"""``entmtp generate``: one prompt, one answer."""

import json
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import (
    load_engine,
    model_options,
    sampling_options,
    sampling_params,
    typical_params,
)

if TYPE_CHECKING:
    from entmtp.engine import GenerationResult

__all__ = ["generate", "result_as_dict"]


@click.command()
@click.option("--prompt", required=True, help="The user's turn, or the raw text with --raw.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options()
@sampling_options
def generate(prompt: str, raw: bool, as_json: bool, **options: Any) -> None:
    """Answer one prompt; the text streams as it is made."""
    sampling, typical = sampling_params(options), typical_params(options)
    engine = load_engine(options, sampling.temperature)
    tokens = engine.encode(prompt) if raw else engine.chat_prompt(prompt)
    result = None
    for chunk in engine.stream(tokens, sampling, typical=typical):
        if not as_json:
            click.echo(chunk.text, nl=False)
        result = chunk.result
    if result is None:
        raise AssertionError("a stream ends with its result")
    if as_json:
        click.echo(json.dumps(result_as_dict(result)))
    else:
        click.echo()
        click.echo(_summary(result), err=True)


def result_as_dict(result: "GenerationResult") -> dict[str, Any]:
    """The JSON form of a result."""
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.as_dict(),
    }


def _summary(result: "GenerationResult") -> str:
    stats = result.stats
    return (
        f"[{stats.num_tokens} tokens in {stats.num_steps} steps, "
        f"{stats.mean_acceptance_length:.2f} tokens a step, "
        f"{stats.decode_tokens_per_s:.1f} tokens/s; {stats.drafter}, {stats.policy}, "
        f"{stats.backend} {stats.dtype}, verification {stats.verification}, seed {result.seed}]"
    )
