"""A whole run: all tasks measured, summarized, and put into one document."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from entmtp.bench.contestants import Contestants
from entmtp.bench.document import Outcome, as_document, settings_digest, settings_of
from entmtp.bench.headroom import measure_headroom
from entmtp.bench.methods import METHODS, Method
from entmtp.bench.peer_setting import PeerSetting
from entmtp.bench.running import BenchParams, Measurement, measure_task
from entmtp.bench.runs import Run
from entmtp.bench.specbench import group_measures
from entmtp.bench.tasks import Task
from entmtp.bench.work import WorkFile
from entmtp.engine import Engine
from entmtp.errors import EntmtpError
from entmtp.params import TypicalParams

__all__ = ["BenchResult", "BenchSession", "peer_setting"]

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BenchResult:
    """What a run gives.

    Attributes:
        document: as JSON has it.
        outcome: the numbers in it.
        runs: by task.
    """

    document: Mapping[str, Any]
    outcome: Outcome
    runs: Mapping[str, Sequence[Run]]


@dataclass
class BenchSession:
    """What is measured, and how.

    Attributes:
        contestants: that decode.
        tasks: that are decoded.
        methods: that were asked for, plain decoding first.
        params: how much.
        typical: lossy typical acceptance; exact without.
        is_strict: whether a method of this program that cannot run is an error.
        traces: folder of traces, for the headroom; ``None``: no headroom.
        show: told a stage, how far it is and how far it goes.
    """

    contestants: Contestants
    tasks: Sequence[Task]
    methods: Sequence[Method]
    params: BenchParams
    typical: TypicalParams | None
    is_strict: bool
    traces: Path | None
    show: Show
    settings: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Find out what the run is about."""
        self.settings = settings_of(
            self.contestants, self.tasks, self.methods, self.params, self.typical
        )

    @property
    def digest(self) -> str:
        """Of the settings."""
        return settings_digest(self.settings)

    def run(self, work: WorkFile, facts: Mapping[str, Any]) -> BenchResult:
        """Measure what the work file does not hold yet; put everything together.

        Args:
            work: of these settings.
            facts: of the machine and the command.

        Raises:
            EntmtpError: a method that was asked for cannot run, or decoding failed.
        """
        outcome, runs = Outcome(), dict[str, Sequence[Run]]()
        for task in self.tasks:
            self.contestants.keep(task, work.policies(task.name))
        systems = {
            task.name: self.contestants.systems(self.methods, task, is_strict=self.is_strict)
            for task in self.tasks
        }
        for task in self.tasks:
            measurement = Measurement(
                self.contestants.engine, self.params, work, self._at(task.name)
            )
            runs[task.name] = measure_task(measurement, task, systems[task.name])
        for task in self.tasks:
            replay = self._headroom(task, list(systems[task.name]))
            outcome.add(task, runs[task.name], replay, self.contestants.loaded_bytes)
        if any(task.all_turns for task in self.tasks):
            outcome.spec_bench = group_measures(self.tasks, list(runs.values()))
        document = as_document(outcome, self.settings, self.contestants, facts, work.num_processes)
        return BenchResult(document, outcome, runs)

    def _headroom(self, task: Task, names: Sequence[str]) -> dict[str, Any]:
        """Nothing where it is not wanted, or the text depends on the trees or on other turns."""
        if self.traces is None or self.typical is not None or task.all_turns:
            return {}
        methods = [METHODS[name] for name in names]
        show = self._at(f"{task.name}, headroom")
        try:
            return measure_headroom(self.contestants, task, methods, self.params, self.traces, show)
        except EntmtpError as error:
            self.contestants.notice(f"no headroom of {task.name}: {error}")
            return {}

    def _at(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.show(stage, done, total)


def peer_setting(
    engine: Engine, model: Path, tasks: Sequence[Task], params: BenchParams, scratch: Path
) -> PeerSetting:
    """What other programs decode, with room for the longest prompt and its answer.

    Args:
        engine: whose tokenizer, threads and device they share.
        model: a Hugging Face folder or a .gguf file.
        tasks: whose prompts must fit.
        params: whose texts must fit.
        scratch: folder for files that they read.
    """
    window = engine.target.config.context_window
    longest = max(len(prompt.tokens) for task in tasks for prompt in task.prompts)
    if not any(task.all_turns for task in tasks):
        window = min(window, longest + params.sampling.max_new_tokens)
    return PeerSetting(
        model=model,
        tokenizer=engine.tokenizer,
        threads=torch.get_num_threads(),
        context=window,
        scratch=scratch,
        is_cpu=engine.target.device.type == "cpu",
    )
