"""A bank where it is used: refused for another model, fitted again on another machine.

Costs do not survive the process, let alone the machine: the same program can land in another
regime of memory. Where processor, backend and threads are those of the calibration, a probe of
about a second rescales the table; elsewhere steps are timed again and the entries are chosen anew
from the traced texts that the bank carries.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from entmtp.bank import Bank, BankSource, EntryScore
from entmtp.calibrate.fit import fit_entries, timing_trees
from entmtp.calibrate.fit_policies import fit_policies, rescale_policies
from entmtp.calibrate.grow import GrowParams, grow_all
from entmtp.calibrate.pareto import predicted_rate
from entmtp.calibrate.places import filler_tokens
from entmtp.calibrate.summary import unpack_trace
from entmtp.calibrate.timing import TimingParams, probe_costs, time_steps
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.engine import Engine
from entmtp.errors import BankError
from entmtp.machine import cpu_name
from entmtp.topology import Path as TreePath
from entmtp.topology import Topology

__all__ = ["adapt_bank", "bank_source", "check_bank", "costs_of", "is_bank_of", "refit_bank"]

_logger = logging.getLogger(__name__)

_SAME_MODEL = ("model_digest", "drafter", "drafter_digest")
_SAME_MACHINE = ("backend", "precision", "device", "threads")
_GROWN_NODES = (7, 15)  # of trees that are timed beside the entries
_QUICK = TimingParams(
    contexts=(256, 1024), batches=(1, 4), min_rounds=3, max_rounds=15, seconds=30.0
)
_LONG_S = 40.0  # of timing, more than which is announced

Progress = Callable[[int, int], None]


def bank_source(engine: Engine, model: str) -> BankSource:
    """What a bank made with this engine belongs to."""
    target = engine.target
    is_cuda = target.device.type == "cuda"
    return BankSource(
        model=model,
        model_digest=target.weights_digest,
        drafter=engine.drafter.name,
        drafter_digest=engine.drafter.digest,
        backend=target.backend,
        precision=target.precision,
        device=torch.cuda.get_device_name(target.device) if is_cuda else cpu_name(),
        threads=torch.get_num_threads(),
    )


def adapt_bank(
    bank: Bank, engine: Engine, cache: Path | None = None, temperature: float | None = None
) -> Bank:
    """The bank with costs of this process.

    Sampling makes drafts dearer, since the noise of a sample is part of its draft; so costs are
    those of one temperature.

    Args:
        bank: one without a calibration is given back as it is.
        engine: that will use it.
        cache: folder in which banks fitted to other machines are kept.
        temperature: of the requests that are to come; ``None`` is that of the calibration.

    Raises:
        BankError: it was made for another model or other heads.
    """
    calibration = bank.calibration
    if calibration is None:
        return bank
    calibrated = unpack_trace(calibration.trace).facts.temperature
    temperature = calibrated if temperature is None else temperature
    here = bank_source(engine, calibration.source.model)
    _check_model(calibration.source, here)
    if _machine(calibration.source) == _machine(here):
        return _rescaled(bank, engine, temperature)
    file = None if cache is None else cache / _cache_name(bank, here)
    kept = _read_kept(file)
    if kept is not None:
        return _rescaled(kept, engine, temperature)
    _logger.warning("%s", _differences(calibration.source, here))
    bank = refit_bank(bank, engine)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            bank.write(file)
        except (OSError, BankError) as error:
            _logger.warning("the fitted bank could not be kept (%s)", error)
    return bank if temperature == calibrated else _rescaled(bank, engine, temperature)


def _read_kept(file: Path | None) -> Bank | None:
    """A bank that was fitted to this machine before; a damaged one is made again."""
    if file is None or not file.exists():
        return None
    try:
        return Bank.read(file)
    except BankError as error:
        _logger.warning("%s; it is made again", error)
        return None


def check_bank(bank: Bank, engine: Engine, cache: Path | None = None) -> str:
    """In words: what using a bank with an engine means.

    Args:
        bank: any.
        engine: that would use it.
        cache: see :func:`adapt_bank`.

    Raises:
        BankError: it was made for another model or other heads.
    """
    if bank.calibration is None:
        return "a bare list of trees: fits every model, and nothing is known of its costs"
    source = bank.calibration.source
    here = bank_source(engine, source.model)
    _check_model(source, here)
    if _machine(source) == _machine(here):
        return "fits: made for this model, these heads and this machine"
    if cache is not None and (cache / _cache_name(bank, here)).exists():
        return f"fits: it {_elsewhere(source, here)}, and was fitted to this machine before"
    return _differences(source, here)


def is_bank_of(bank: Bank, engine: Engine) -> bool:
    """Whether a bank was made for the model and the drafter of an engine."""
    if bank.calibration is None:
        return True
    source = bank.calibration.source
    return not _foreign(source, bank_source(engine, source.model))


def costs_of(bank: Bank, here: BankSource) -> tuple[BankSource, CostTable]:
    """Costs of a bank for another bank of the same model and heads, and what that one belongs to.

    Raises:
        BankError: it has no costs, or those of another model or other heads.
    """
    if bank.calibration is None:
        raise BankError("the bank is not calibrated, so it has no costs")
    _check_model(bank.calibration.source, here)
    return replace(here, **_machine(bank.calibration.source)), bank.calibration.costs


def refit_bank(bank: Bank, engine: Engine, progress: Progress | None = None) -> Bank:
    """Time steps here, and choose the entries anew from the traced texts in the bank.

    Args:
        bank: made for this model and these heads.
        engine: whose steps are timed; it must be idle.
        progress: told rounds of timing done and the most that there will be; without one a
            warning says how long it takes, where it takes long.

    Raises:
        BankError: the bank carries no calibration.
    """
    calibration = bank.calibration
    if calibration is None:
        raise BankError("the bank is not calibrated; make one with 'entmtp calibrate'")
    trace = unpack_trace(calibration.trace)
    max_nodes = int(calibration.settings["max_nodes"])
    trees = grow_all(trace.halves()[0], GrowParams(max_nodes=max_nodes))
    timing = replace(_QUICK, temperature=trace.facts.temperature)
    plans = timing_trees(trees, is_quick=True)
    told = progress or _Forecast(timing)
    costs = time_steps(engine, plans, filler_tokens(engine), timing, told)
    source = bank_source(engine, calibration.source.model)
    settings = {**calibration.settings, "refitted_from": asdict(calibration.source)}
    calibration = replace(calibration, source=source, costs=costs, settings=settings)
    if _is_typical(bank):  # its trees were scored by decoding, which replay cannot do
        return Bank.of(bank.entries, _rated(bank, trace, costs), calibration)
    entries, scores = fit_entries(trace, costs, max_nodes)
    policies = fit_policies(trace, entries, costs, calibration.context)
    return Bank.of(entries, scores, replace(calibration, policies=policies))


class _Forecast:
    """Says after the first counted round of timing how long the rest takes, where that is long."""

    def __init__(self, params: TimingParams) -> None:
        self._params, self._warm_s = params, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done == 0:  # the round before the first has filled contexts too
            self._warm_s = now
        elif done == 1:
            left_s = (now - self._warm_s) * (self._params.min_rounds - 1)
            if left_s > _LONG_S:
                _logger.warning("timing steps takes about %.0f s more", left_s)


def _rescaled(bank: Bank, engine: Engine, temperature: float) -> Bank:
    """The bank with its costs scaled to this process, and the rates that follow."""
    calibration = bank.calibration
    assert calibration is not None  # noqa: S101 - the callers looked
    trees = [tree for tree in bank.entries.values() if tree.num_nodes]
    if not trees:
        return bank
    trace = unpack_trace(calibration.trace)
    trees += _larger(trace.facts.envelope)
    first = calibration.costs.contexts[0]
    probe = probe_costs(engine, first, trees, filler_tokens(engine), temperature)
    costs, found = probe.rescale(calibration.costs)
    policies = rescale_policies(
        trace,
        bank.entries,
        calibration.policies,
        (calibration.costs, costs),
        calibration.context,
    )
    scores = _rated(bank, trace, costs)
    settings = {**calibration.settings, "probe": found}
    calibration = replace(calibration, costs=costs, policies=policies, settings=settings)
    return Bank.of(bank.entries, scores, calibration)


def _larger(envelope: Sequence[TreePath]) -> list[Topology]:
    """Trees of sizes that no entry may have, but that grown trees reach."""
    sizes = [nodes for nodes in _GROWN_NODES if nodes <= len(envelope)]
    return [Topology(tuple(envelope[:nodes])) for nodes in sizes]


def _rated(bank: Bank, trace: Trace, costs: CostTable) -> Mapping[str, EntryScore]:
    assert bank.calibration is not None  # noqa: S101 - the callers looked
    context = bank.calibration.context
    fitting, _ = trace.halves()

    def rated(score: EntryScore, tree: Topology) -> EntryScore:
        step_ms = costs.step_ms(tree, context)
        rate = predicted_rate(fitting, tree, costs)
        if _is_typical(bank) and score.accept_own is not None:
            rate = 1000 * score.accept_own / step_ms
        return replace(score, step_ms=step_ms, tokens_per_s=rate)

    return {name: rated(score, bank.entries[name]) for name, score in bank.scores.items()}


def _is_typical(bank: Bank) -> bool:
    """Whether trees were scored by decoding under typical acceptance."""
    calibration = bank.calibration
    return calibration is not None and calibration.settings.get("verification") == "typical"


def _check_model(there: BankSource, here: BankSource) -> None:
    """Refuse a bank of another model or of other heads."""
    for name in _foreign(there, here):
        raise BankError(
            f"the bank was calibrated for {there.model} with {there.drafter} "
            f"({there.model_digest}, {there.drafter_digest}), not for this model with "
            f"{here.drafter} ({here.model_digest}, {here.drafter_digest}): its {name} differs; "
            "calibrate again, or use the model and heads that it belongs to"
        )


def _foreign(there: BankSource, here: BankSource) -> list[str]:
    """What of model and drafter differs."""
    return [name for name in _SAME_MODEL if getattr(there, name) != getattr(here, name)]


def _machine(source: BankSource) -> dict[str, Any]:
    return {name: getattr(source, name) for name in _SAME_MACHINE}


def _differences(there: BankSource, here: BankSource) -> str:
    """In words: on what other machine steps were timed, and what follows."""
    return (
        f"the bank {_elsewhere(there, here)}; steps are timed again here at the first use, "
        "which takes about a minute, and longer where steps are slow"
    )


def _elsewhere(there: BankSource, here: BankSource) -> str:
    found = [
        f"{name} {getattr(there, name)}, here {getattr(here, name)}"
        for name in _SAME_MACHINE
        if getattr(there, name) != getattr(here, name)
    ]
    return f"was timed elsewhere ({'; '.join(found)})"


def _cache_name(bank: Bank, here: BankSource) -> str:
    own = import_module("entmtp").__version__  # by name: the package imports what is below it
    text = json.dumps([own, bank.to_json(), asdict(here)])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
