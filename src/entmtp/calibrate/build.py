"""The whole calibration: from a loaded engine and prompts to a bank."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from entmtp.bank import NONE, Bank, Calibration, EntryScore
from entmtp.calibrate.adapt import bank_source, costs_of
from entmtp.calibrate.collect import TraceSettings
from entmtp.calibrate.distributed import Cluster
from entmtp.calibrate.fit import find_candidates, mean_context, timing_trees
from entmtp.calibrate.fit_policies import fit_policies
from entmtp.calibrate.grow import GrownTree, GrowParams, grow_all
from entmtp.calibrate.measure import Measured, measure_entries
from entmtp.calibrate.pareto import Candidate, acceptance_frontier, select_entries
from entmtp.calibrate.places import filler_tokens
from entmtp.calibrate.points import cost_table
from entmtp.calibrate.recalibrate import recalibrate_by_decoding
from entmtp.calibrate.session import encode_records, trace_prompts
from entmtp.calibrate.summary import pack_trace, shorten
from entmtp.calibrate.timing import TimingParams, time_steps, timing_points
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.engine import Engine
from entmtp.errors import BankError, InputError
from entmtp.files import write_text
from entmtp.params import TypicalParams
from entmtp.topology import Topology
from entmtp.workload import PromptRecord

__all__ = ["CalibrateParams", "CalibrationRun", "Calibrator", "check_tasks", "spread_over_tasks"]

Progress = Callable[[str, int, int], None]

_MOST_DECODED = 24  # trees that decode all prompts where acceptance is typical


@dataclass(frozen=True)
class CalibrateParams:
    """How a bank is made.

    Attributes:
        max_nodes: of the trees.
        timing: how costs are measured.
        costs: of this machine, instead of timing; or a bank whose costs are taken, and to whose
            machine the new bank then belongs.
        measure: decode the ``best`` few entries end to end, ``all`` of the acceptance frontier
            (the paper's way), or ``none``.
        num_measured: most entries that ``best`` decodes, plain decoding included.
        measured_prompts: prompts that are decoded with each, at least.
        measured_texts: decoded texts to go for: prompts are more where entries are few.
        measured_tokens: of each of them.
        typical: score trees by decoding under typical acceptance; exact without.
    """

    max_nodes: int = 64
    timing: TimingParams = field(default_factory=TimingParams)
    costs: CostTable | Bank | None = None
    measure: Literal["best", "all", "none"] = "best"
    num_measured: int = 8
    measured_prompts: int = 12
    measured_texts: int = 72
    measured_tokens: int = 64
    typical: TypicalParams | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            InputError: says which value.
        """
        GrowParams(max_nodes=self.max_nodes)
        if self.measure not in ("best", "all", "none"):
            raise InputError(f"measure is {self.measure!r}; it must be best, all or none")
        for name, least in (
            ("num_measured", 2),
            ("measured_prompts", 1),
            ("measured_texts", 1),
            ("measured_tokens", 2),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class CalibrationRun:
    """A bank and what it was chosen from.

    Attributes:
        bank: the result.
        trace: of all texts, in the short form that the bank was fitted to, but with their tokens.
        candidates: every tree that was scored, on the fitting half.
        measured: entry -> its texts.
    """

    bank: Bank
    trace: Trace
    candidates: tuple[Candidate, ...]
    measured: Mapping[str, Measured]


class Calibrator:
    """Traces, grows, times, selects and measures; each stage goes on where it was cut off."""

    def __init__(  # noqa: PLR0913 - the last is keyword-only
        self,
        engine: Engine,
        model: str,
        settings: TraceSettings,
        params: CalibrateParams,
        folders: tuple[Path, Path],
        progress: Progress,
        *,
        cluster: Cluster | None = None,
    ) -> None:
        """Say what is done where.

        Args:
            engine: its target and drafter are calibrated; the scheduler is not asked.
            model: its name.
            settings: how texts are written and traced.
            params: how much is done.
            folders: of traces, which are found again; and of work in progress, which the caller
                removes once the bank is written.
            progress: told a stage, how far it is and how far it goes.
            cluster: traces and times; ``None``: this process does.
        """
        self._engine, self._model = engine, model
        self._settings, self._params = settings, params
        self._traces, self._work = folders
        self._progress = progress
        self._cluster = cluster

    def run(self, records: Sequence[PromptRecord], provenance: Mapping[str, Any]) -> CalibrationRun:
        """Make a bank.

        Args:
            records: at least two prompts a task; every second one is kept for the check.
            provenance: of the run.

        Raises:
            EntmtpError: prompts that are too few, or a stage that fails.
        """
        check_tasks(records)
        params = self._params
        source = bank_source(self._engine, self._model)
        if isinstance(params.costs, Bank):
            source, costs = costs_of(params.costs, source)
        trace = self._trace(records)
        fitting, _ = trace.halves()
        trees = grow_all(fitting, GrowParams(max_nodes=params.max_nodes), progress=self._at("grow"))
        if not isinstance(params.costs, Bank):
            costs = params.costs or self._timed(trace, trees)
        candidates = find_candidates(fitting, trees, costs)
        if params.typical is not None:
            candidates = self._recalibrated(trace, records, candidates, params.typical)
        with_frontier = params.measure == "all"
        entries, scores = select_entries(fitting, candidates, costs, with_frontier=with_frontier)
        measured: dict[str, Measured] = {}
        if params.measure != "none" and params.typical is None:
            measured = self._measured(trace, records, entries, scores, costs)
            scores |= {name: _with_measured(scores[name], one) for name, one in measured.items()}
        context, policies = mean_context(fitting), {}
        if params.typical is None:  # under typical acceptance the text depends on the trees
            policies = fit_policies(trace, entries, costs, context, self._at("fit"))
        settings = {
            "max_nodes": params.max_nodes,
            "measure": params.measure,
            "verification": "exact" if params.typical is None else "typical",
        }
        calibration = Calibration(
            source=source,
            costs=costs,
            context=context,
            trace=pack_trace(trace),
            settings=settings,
            provenance=provenance,
            policies=policies,
        )
        bank = Bank.of(entries, scores, calibration)
        return CalibrationRun(bank, trace, tuple(candidates), measured)

    def _at(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(stage, done, total)

    def _trace(self, records: Sequence[PromptRecord]) -> Trace:
        trace = trace_prompts(
            self._engine,
            self._model,
            records,
            self._settings,
            self._at("trace"),
            folder=self._traces,
            tracer=self._cluster.trace_groups if self._cluster else None,
        )
        return replace(shorten(trace), tokens=trace.tokens)

    def _timed(self, trace: Trace, trees: Sequence[GrownTree]) -> CostTable:
        """Measured costs; found again where they were finished in the same work folder."""
        plans = timing_trees(trees)
        timing = replace(self._params.timing, temperature=trace.facts.temperature)
        source = asdict(bank_source(self._engine, self._model))
        plan_lists = [plan.to_list() for plan in plans]
        key = _key([source, trace.facts.to_json(), plan_lists, asdict(timing)])
        file = self._work / f"costs-{key}.json"
        if file.exists():
            try:
                return CostTable.from_dict(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, BankError) as error:
                raise BankError(f"{file}: damaged ({error}); delete it and run again") from error
        if self._cluster is None:
            tokens = filler_tokens(self._engine)
            costs = time_steps(self._engine, plans, tokens, timing, self._at("time"))
        else:
            points = timing_points(self._engine, plans, timing)
            costs = cost_table(self._cluster.time_points(points, timing, self._at("time")))
        write_text(file, json.dumps(costs.as_dict()))
        return costs

    def _recalibrated(
        self,
        trace: Trace,
        records: Sequence[PromptRecord],
        candidates: Sequence[Candidate],
        typical: TypicalParams,
    ) -> list[Candidate]:
        """The acceptance frontier with what its trees keep when they decode, and plain decoding."""
        frontier = acceptance_frontier(candidates)
        step = max(1, -(-len(frontier) // _MOST_DECODED))
        chosen = frontier[::step]
        prompts = encode_records(self._engine, records)
        source = asdict(bank_source(self._engine, self._model))
        trees = [candidate.topology.to_list() for candidate in chosen]
        key = _key([source, trace.facts.to_json(), trees, asdict(typical)])
        counts = recalibrate_by_decoding(
            self._engine,
            {text: prompts[text] for text in trace.half_texts()[0]},
            [candidate.topology for candidate in chosen],
            self._settings.sampling,
            typical,
            work=self._work / f"recalibrated-{key}.json",
            progress=self._at("recalibrate"),
        )
        found = [c for c in candidates if not c.topology.num_nodes]
        for candidate, count in zip(chosen, counts, strict=True):
            rate = 1000 * count.mean_acceptance_length / candidate.step_ms
            found.append(replace(candidate, own=count, tokens_per_s=rate))
        return found

    def _measured(
        self,
        trace: Trace,
        records: Sequence[PromptRecord],
        entries: Mapping[str, Topology],
        scores: Mapping[str, EntryScore],
        costs: CostTable,
    ) -> dict[str, Measured]:
        """Decode some entries on texts of the check half."""
        params = self._params
        chosen = _entries_to_measure(entries, scores, params)
        count = max(params.measured_prompts, params.measured_texts // len(chosen))
        texts = spread_over_tasks(trace, trace.half_texts()[1], count)
        prompts = encode_records(self._engine, records)
        trees = {name: entries[name].to_list() for name in chosen}
        source = asdict(bank_source(self._engine, self._model))
        key = _key([source, trace.facts.to_json(), trees, params.measured_tokens, costs.as_dict()])
        return measure_entries(
            self._engine,
            trace,
            {text: prompts[text] for text in texts},
            {name: entries[name] for name in chosen},
            costs,
            max_new_tokens=params.measured_tokens,
            work=self._work / f"measured-{key}.json",
            progress=self._at("measure"),
        )


def _key(about: object) -> str:
    """Name of a file of work that differs where what it is about does."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def spread_over_tasks(trace: Trace, texts: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the texts, as evenly over their tasks, and within each, as may be."""
    by_task: dict[str, list[int]] = {}
    for text in texts:
        by_task.setdefault(trace.tasks[text], []).append(text)
    left, found = count, []
    tasks = sorted(by_task.values(), key=len)  # the small ones first: others take what they leave
    for number, own in enumerate(tasks):
        share = min(len(own), left // (len(tasks) - number))
        found += [own[at * len(own) // share] for at in range(share)]
        left -= share
    return sorted(found)


def _entries_to_measure(
    entries: Mapping[str, Topology], scores: Mapping[str, EntryScore], params: CalibrateParams
) -> list[str]:
    if params.measure == "all":
        return [name for name, one in scores.items() if "frontier" in one.source] + [NONE]
    others = [name for name in entries if name != NONE]
    others.sort(key=lambda name: -(scores[name].tokens_per_s or 0.0))
    return [NONE, *others[: params.num_measured - 1]]


def _with_measured(score: EntryScore, measured: Measured) -> EntryScore:
    return replace(
        score,
        measured_tokens_per_s=measured.tokens_per_s,
        predicted_on_check=measured.predicted_tokens_per_s,
        time_ratio=measured.time_ratio,
    )


def check_tasks(records: Sequence[PromptRecord]) -> None:
    """Refuse tasks that cannot be halved.

    Raises:
        InputError: a task of one prompt.
    """
    for task, count in Counter(record.task for record in records).items():
        if count < 2:
            raise InputError(
                f"task {task!r} has one prompt; a bank is fitted to one half of the prompts and "
                "checked on the other, so give at least two"
            )
