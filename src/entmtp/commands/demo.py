"""``entmtp demo``: plain and EntMTP decoding of one prompt, side by side."""

from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import load_engine, model_options
from entmtp.params import SamplingParams

if TYPE_CHECKING:
    from entmtp.metrics import DecodeStats

__all__ = ["demo"]

_PROMPT = "Write a Python function that checks whether a number is prime, and explain how it works."


@click.command()
@click.option("--prompt", default=_PROMPT, help="The user's turn.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@model_options()
def demo(prompt: str, max_new_tokens: int, **options: Any) -> None:
    """Decode a prompt plainly and with draft trees; show that the output is the same."""
    from entmtp.drafters.empty import EmptyDrafter
    from entmtp.engine import Engine
    from entmtp.scheduler import FixedScheduler

    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    engine = load_engine(options)
    plain_engine = Engine(engine.target, EmptyDrafter(), FixedScheduler.plain(), engine.tokenizer)
    tokens = engine.chat_prompt(prompt)
    warm_up = SamplingParams(max_new_tokens=8)
    plain_engine.generate(tokens, warm_up)
    engine.generate(tokens, warm_up)
    plain = plain_engine.generate(tokens, sampling)
    fast = engine.generate(tokens, sampling)
    click.echo(f"prompt: {prompt}\n\n{fast.text}\n")
    click.echo(f"identical: {'yes' if plain.token_ids == fast.token_ids else 'NO'}")
    click.echo(_row("plain", plain.stats))
    click.echo(_row(f"EntMTP ({fast.stats.drafter}, {fast.stats.policy})", fast.stats))
    trees = ", ".join(f"{name} x{count}" for name, count in fast.stats.topology_steps.items())
    click.echo(f"trees chosen: {trees}")
    if plain.token_ids != fast.token_ids:
        raise SystemExit(1)


def _row(name: str, stats: "DecodeStats") -> str:
    return (
        f"{name:<28}{stats.decode_tokens_per_s:8.1f} tokens/s"
        f"{stats.mean_acceptance_length:8.2f} tokens per step"
        f"{stats.num_tokens:6d} tokens{stats.num_steps:6d} steps"
    )
