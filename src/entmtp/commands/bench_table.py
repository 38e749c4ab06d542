"""How ``entmtp bench`` shows where it is, and what it found."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from entmtp.bench.methods import METHODS, PLAIN

__all__ = ["BenchProgress", "print_spec_bench", "print_task"]

_REPAINT_S = 0.25
_LINE_S = 30.0
_TITLES = (
    f"{'method':<18}{'tokens/s':>9}{'95 %':>17}{'x plain':>9}{'tok/step':>9}{'same':>9}"
    f"{'gap, nats':>11}  {'sched/draft/fwd/rest, ms':<25}{'switches':>9}{'headroom':>9}"
)


class BenchProgress:
    """Takes what is done of a stage; shows it with the time that is left."""

    def __init__(self, *, is_terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing yet.

        Args:
            is_terminal: whether a line of standard error can be written over.
            clock: in seconds.
        """
        self._is_terminal, self._clock = is_terminal, clock
        self._stage, self._first, self._started, self._shown = "", 0, 0.0, -math.inf

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take in how far a stage is."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._first, self._started = stage, done, now
            self._shown = -math.inf if self._is_terminal else now
        is_last = done == total
        if not is_last and now - self._shown < (_REPAINT_S if self._is_terminal else _LINE_S):
            return
        self._shown = now
        line = f"{stage}: {done}/{total} prompts, {_duration(now - self._started)}"
        made = done - self._first
        if made and not is_last:
            line += f", {_duration((now - self._started) / made * (total - done))} left"
        if self._is_terminal:
            click.echo(f"\r\x1b[2K{line}", nl=is_last, err=True, color=True)
        else:
            click.echo(line, err=True)


def print_task(
    task: str,
    results: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, Mapping[str, Any]],
    headroom: Mapping[str, float | None],
) -> None:
    """One line a method."""
    plain = results[PLAIN]
    num_prompts, num_runs = plain["num_prompts"], plain["num_runs"]
    click.echo(
        f"{task}: {num_prompts} prompts, {num_runs // num_prompts} times; plain decoding wrote "
        f"{plain['num_decoded']} tokens after the first"
    )
    click.echo(_TITLES)
    for name, one in results.items():
        ratio = ratios.get(f"{name}/{PLAIN}", {"value": 1.0 if name == PLAIN else math.nan})
        switches = "-" if one["num_switches"] is None else str(one["num_switches"])
        same = f"{one['num_identical']}/{one['num_runs']}"
        click.echo(
            f"{name:<18}{one['tokens_per_s']:>9.1f}{_interval(one['ci95']):>17}"
            f"{ratio['value']:>8.2f}x{one['mean_acceptance_length']:>9.2f}{same:>9}"
            f"{one['gap_nats']:>+11.4f}  {_split(one['split_ms']):<25}{switches:>9}"
            f"{_share(headroom.get(name)):>9}"
        )
    if any(METHODS[name].peer is not None for name in results):
        click.echo("x plain of other programs: on the prompts that both decoded")


def print_spec_bench(measures: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> None:
    """Speed-up and mean accepted tokens of each method in each group."""
    groups: Sequence[str] = list(next(iter(measures.values())))
    click.echo("Spec-Bench: speed-up over plain decoding, prompts included / mean accepted tokens")
    click.echo(f"{'method':<18}" + "".join(f"{group:>16}" for group in groups))
    for name, found in measures.items():
        cells = "".join(f"{_measure(found.get(group)):>16}" for group in groups)
        click.echo(f"{name:<18}{cells}")


def _measure(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    accepted = found["mean_accepted_tokens"]
    return f"{found['speed_up']:.2f}x / " + ("-" if accepted is None else f"{accepted:.2f}")


def _interval(ends: Sequence[float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.1f}-{ends[1]:.1f}"


def _split(split: Mapping[str, float] | None) -> str:
    return "-" if split is None else "/".join(f"{ms:.2f}" for ms in split.values())


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
