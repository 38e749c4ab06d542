"""The measurement: prompts in order, methods in turn, a prompt at a time kept."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from entmtp.bench.likelihood import Likelihood
from entmtp.bench.memory import PeakMemory
from entmtp.bench.methods import METHODS
from entmtp.bench.runs import Run, Turn
from entmtp.bench.systems import System
from entmtp.bench.tasks import Task
from entmtp.bench.work import WorkFile
from entmtp.engine import Engine
from entmtp.errors import InputError
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed

__all__ = ["BenchParams", "Measurement", "measure_task", "order_of"]

_REST_S = 0.02  # in which the threads of the method before go to sleep
_WARM_UP_TOKENS = 8

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BenchParams:
    """How much is measured.

    Attributes:
        sampling: of all methods; the seed is set, prompts derive theirs from it.
        repeats: times that every prompt is decoded by every method.
        peer_limit: prompts of a task that other programs decode too.
    """

    sampling: SamplingParams
    repeats: int = 1
    peer_limit: int = 10

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InputError: says which value.
        """
        for name in ("repeats", "peer_limit"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sampling.seed is None:
            raise InputError("seed is None; texts are compared under one seed, so name it")


@dataclass(frozen=True)
class Measurement:
    """What measures a task, besides the systems.

    Attributes:
        engine: its tokenizer encodes later turns, its target reads all texts.
        params: how much.
        work: where finished prompts are kept.
        progress: told prompts done and their number, repeats counted.
    """

    engine: Engine
    params: BenchParams
    work: WorkFile
    progress: Progress


def measure_task(it: Measurement, task: Task, systems: Mapping[str, System]) -> list[Run]:
    """Decode every prompt of a task with every system, repeat after repeat.

    The order of the systems changes from prompt to prompt, see :func:`order_of`, so that a slow
    spell of the machine, and what one leaves behind for the next, hit all alike. Each has a short
    text to warm up, which is not counted. Between two prompts other work is done; so the last in
    line writes such a text again before the first, which then follows another one as all do. What
    the work file holds is not decoded again.

    Args:
        it: what measures.
        task: its prompts.
        systems: by method; plain decoding among them.
    """
    runs: list[Run] = []
    names, is_warm = list(systems), False
    likelihood = Likelihood(it.engine.target)
    total = it.params.repeats * len(task.prompts)
    for number in range(total):
        repeat, prompt = divmod(number, len(task.prompts))
        found = it.work.get(task.name, prompt, repeat)
        if found is None:
            if not is_warm:
                _warm_up(it, task, systems.values())
                is_warm = True
            order = order_of([n for n in names if _takes(it.params, n, prompt)], prompt + repeat)
            _warm_up(it, task, [systems[order[-1]]])
            decoded = {n: _decode(it, task, n, systems[n], (prompt, repeat)) for n in order}
            found = tuple(
                _scored(it.engine, likelihood, task, decoded[name])
                for name in names
                if name in decoded
            )
            likelihood.forget()
            it.work.add(task.name, found)
        runs += found
        it.progress(number + 1, total)
    return runs


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """The order in which methods decode a prompt: rows of a Latin square, by E. J. Williams (1949).

    In as many turns as there are methods each has every place once; in twice as many, of which the
    second half is turned round, each follows every other one twice.

    Args:
        names: of the methods.
        turn: number of the prompt, from 0.
    """
    size = len(names)
    first = [(at + 1) // 2 if at % 2 else -(at // 2) for at in range(size)]
    order = [names[(at + turn) % size] for at in first]
    return order[::-1] if turn // size % 2 else order


def _takes(params: BenchParams, name: str, prompt: int) -> bool:
    return METHODS[name].peer is None or prompt < params.peer_limit


def _warm_up(it: Measurement, task: Task, systems: Iterable[System]) -> None:
    size = min(_WARM_UP_TOKENS, it.params.sampling.max_new_tokens)
    sampling = replace(it.params.sampling, max_new_tokens=size)
    for system in systems:
        system.decode(task.prompts[0].tokens, sampling)


def _decode(it: Measurement, task: Task, name: str, system: System, at: tuple[int, int]) -> Run:
    """All turns of one prompt under one method."""
    prompt, repeat = at
    peak = PeakMemory(it.engine.target.device)
    seed = derive_seed(it.params.sampling.seed or 0, prompt)
    turns: list[Turn] = []
    peak.start()
    while (tokens := _next_prompt(it.engine, task, prompt, turns)) is not None:
        time.sleep(_REST_S)
        sampling = replace(it.params.sampling, seed=derive_seed(seed, len(turns)))
        turns.append(system.decode(tokens, sampling))
    return Run(prompt, repeat, name, tuple(turns), peak.peak_bytes())


def _scored(engine: Engine, likelihood: Likelihood, task: Task, run: Run) -> Run:
    turns: list[Turn] = []
    for turn in run.turns:
        tokens = _next_prompt(engine, task, run.prompt, turns)
        assert tokens is not None  # noqa: S101 - it was decoded
        turns.append(likelihood.scored(tokens, turn))
    return replace(run, turns=tuple(turns))


def _next_prompt(
    engine: Engine, task: Task, prompt: int, turns: Sequence[Turn]
) -> Sequence[int] | None:
    """What comes after some answers; ``None`` where nothing does, or the window is full."""
    if not turns:
        return task.prompts[prompt].tokens
    asked = task.turns(prompt)
    if len(turns) == len(asked):
        return None
    messages = []
    for question, turn in zip(asked, turns, strict=False):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": turn.text})
    messages.append({"role": "user", "content": asked[len(turns)]})
    tokens = engine.tokenizer.encode_chat(messages)
    return tokens if len(tokens) < engine.target.config.context_window else None
