"""The JSON document of a run: settings, results, ratios, headroom, and where they come from."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from entmtp import __version__
from entmtp.bench.contestants import Contestants
from entmtp.bench.methods import Method
from entmtp.bench.running import BenchParams
from entmtp.bench.runs import Run
from entmtp.bench.summary import summarize
from entmtp.bench.tasks import Task
from entmtp.bench.vllm import find_vllm
from entmtp.bootstrap import CONFIDENCE, RESAMPLES, SEED
from entmtp.calibrate.adapt import bank_source
from entmtp.errors import EntmtpError
from entmtp.kernels.library import library_digest
from entmtp.params import TypicalParams
from entmtp.target.native import NativeTarget

__all__ = ["Outcome", "as_document", "find_differences", "settings_digest", "settings_of"]

_PEERS = {"hf": "transformers", "llamacpp": "llama-cpp-python", "vllm": "vllm"}
"""Packages of other programs."""


@dataclass
class Outcome:
    """What a run found, task by task.

    Attributes:
        results: ``[task][method]``.
        ratios: ``[task]["a/b"]``.
        headroom: ``[task][method]``: share of what a clairvoyant gains.
        replay: ``[task][method]``: what the share is made of.
        spec_bench: ``[method][group]``, in that mode.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: dict[str, dict[str, Any]] = field(default_factory=dict)
    headroom: dict[str, dict[str, float | None]] = field(default_factory=dict)
    replay: dict[str, dict[str, Any]] = field(default_factory=dict)
    spec_bench: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        task: Task,
        runs: Sequence[Run],
        replay: Mapping[str, Mapping[str, Any]],
        loaded_bytes: Mapping[str, int],
    ) -> None:
        """Take in a task that is done."""
        results, ratios = summarize(task, runs, loaded_bytes)
        self.results[task.name], self.ratios[task.name] = results, ratios
        self.headroom[task.name] = {name: found["share"] for name, found in replay.items()}
        self.replay[task.name] = {name: dict(found) for name, found in replay.items()}


def settings_of(
    contestants: Contestants,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    params: BenchParams,
    typical: TypicalParams | None,
) -> dict[str, Any]:
    """What decides about the numbers: rows of another process are of this run where it is equal."""
    heads = contestants.heads
    source = asdict(bank_source(contestants.engine, heads.model))
    return {
        "source": source,
        "methods": [method.name for method in methods],
        "tasks": {task.name: task.digest for task in tasks},
        "num_prompts": {task.name: len(task.prompts) for task in tasks},
        "all_turns": any(task.all_turns for task in tasks),
        "heads": {"medusa": heads.medusa, "hydra": heads.hydra},
        "heads_digests": _heads_digests(contestants, methods),
        "banks": {name: found.digest for name, found in heads.banks.items()},
        "versions": _versions(contestants, methods),
        "core": _core_digest(contestants, params),
        "max_new_tokens": params.sampling.max_new_tokens,
        "temperature": params.sampling.temperature,
        "seed": params.sampling.seed,
        "verification": "exact" if typical is None else "typical (lossy)",
        "typical": None if typical is None else asdict(typical),
        "repeats": params.repeats,
        "peer_limit": params.peer_limit,
    }


def settings_digest(settings: Mapping[str, Any]) -> str:
    """A name that differs where settings do."""
    return _digest(json.dumps(settings, sort_keys=True))


def as_document(
    outcome: Outcome,
    settings: Mapping[str, Any],
    contestants: Contestants,
    facts: Mapping[str, Any],
    num_processes: int,
) -> dict[str, Any]:
    """The whole.

    Args:
        outcome: of the tasks.
        settings: of the run.
        contestants: that ran.
        facts: of the machine and the command.
        num_processes: that took part, resumed ones counted.
    """
    target = contestants.engine.target
    return {
        **facts,
        "cpu": settings["source"]["device"],
        "device": str(target.device),
        "backend": target.backend,
        "precision": target.precision,
        "dtype": str(target.dtype),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "versions": {
            "numpy": version("numpy"),
            **{name: _peer_version(name, contestants) for name in _PEERS.values()},
        },
        "interval": f"bootstrap over prompts, {RESAMPLES} draws, seed {SEED}, percentiles",
        "confidence": CONFIDENCE,
        "num_processes": num_processes,
        "settings": dict(settings),
        "bank_costs": {name: found.costs for name, found in contestants.heads.banks.items()},
        "left_out": dict(contestants.left_out),
        **{key: value for key, value in asdict(outcome).items() if key != "spec_bench" or value},
    }


def find_differences(outcome: Outcome, *, is_exact: bool) -> list[str]:
    """``task: method`` of each method of this program whose texts must be plain's and are not."""
    if not is_exact:
        return []
    return [
        f"{task}: {name} ({one['num_identical']} of {one['num_runs']} texts)"
        for task, results in outcome.results.items()
        for name, one in results.items()
        if not one["is_peer"] and not one["identical"]
    ]


def _heads_digests(contestants: Contestants, methods: Sequence[Method]) -> dict[str, str | None]:
    """Of the published systems that take part; ``None`` for heads that cannot be had."""
    found: dict[str, str | None] = {}
    for method in methods:
        if method.heads in ("medusa", "hydra"):
            try:
                found[method.heads] = contestants.drafter(method).digest
            except EntmtpError:  # told where the method is to run
                found[method.heads] = None
    return found


def _versions(contestants: Contestants, methods: Sequence[Method]) -> dict[str, str | None]:
    """Of this program, and of those that take part."""
    peers = {_PEERS[method.peer] for method in methods if method.peer is not None}
    found = {name: _peer_version(name, contestants) for name in sorted(peers)}
    return {"entmtp": __version__, "torch": torch.__version__, **found}


def _core_digest(contestants: Contestants, params: BenchParams) -> str | None:
    """Of the native library where it computes the target, or the noise of sampling."""
    target = contestants.engine.target
    is_drawn = not params.sampling.is_greedy and target.device.type == "cpu"
    return library_digest() if isinstance(target, NativeTarget) or is_drawn else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _peer_version(package: str, contestants: Contestants) -> str | None:
    if package == _PEERS["vllm"]:
        return find_vllm(contestants.peers.vllm_python)
    try:
        return version(package)
    except PackageNotFoundError:
        return None
