"""``entmtp chat``: a conversation in the terminal."""

import contextlib
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
from entmtp.params import SamplingParams, TypicalParams

if TYPE_CHECKING:
    from entmtp.engine import Engine
    from entmtp.metrics import DecodeStats

__all__ = ["chat"]

_HELP = "Type a message. /new starts over, /stats shows the last answer's numbers, /bye ends."


@click.command()
@click.option("--system", default=None, help="A system message.")
@model_options()
@sampling_options
def chat(system: str | None, **options: Any) -> None:
    """Talk with the model; answers stream as they are made."""
    sampling, typical = sampling_params(options), typical_params(options)
    engine = load_engine(options, sampling.temperature)
    click.echo(_HELP, err=True)
    session = _Session(engine, sampling, typical, system)
    while True:
        try:
            line = click.prompt("you", prompt_suffix="> ", err=True).strip()
        except (click.Abort, EOFError):
            click.echo(err=True)
            return
        if line == "/bye":
            return
        try:
            session.take(line)
        except InputError as error:
            click.echo(f"Error: {error}", err=True)


class _Session:
    """The conversation so far."""

    def __init__(
        self,
        engine: "Engine",
        sampling: SamplingParams,
        typical: TypicalParams | None,
        system: str | None,
    ) -> None:
        self._engine, self._sampling, self._typical = engine, sampling, typical
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._last = "nothing has been said yet"

    def take(self, line: str) -> None:
        """Obey a command, or answer a message. Ctrl-C ends an answer, not the conversation."""
        if line == "/new":
            self._messages = list(self._start)
        elif line == "/stats":
            click.echo(self._last, err=True)
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        tokens = self._engine.chat_prompt(messages)
        pieces: list[str] = []
        with contextlib.suppress(KeyboardInterrupt):
            stream = self._engine.stream(tokens, self._sampling, typical=self._typical)
            with contextlib.closing(stream):
                for chunk in stream:
                    click.echo(chunk.text, nl=False)
                    pieces.append(chunk.text)
                    if chunk.result is not None:
                        self._note(chunk.result.stats)
        click.echo()
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces) or "..."}]

    def _note(self, stats: "DecodeStats") -> None:
        self._last = (
            f"{stats.num_tokens} tokens, {stats.mean_acceptance_length:.2f} a step, "
            f"{stats.decode_tokens_per_s:.1f} tokens/s, {stats.topology_steps}"
        )
