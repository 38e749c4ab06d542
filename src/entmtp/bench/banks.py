"""Banks as they are named on the command line: one for all tasks, or one for each."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp.bank import Bank, load_bank
from entmtp.calibrate.adapt import adapt_bank
from entmtp.costs import CostTable
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine
from entmtp.errors import InputError

__all__ = ["TaskBank", "bank_digest", "found_costs", "load_banks"]


@dataclass(frozen=True)
class TaskBank:
    """A bank of a task.

    Attributes:
        bank: with costs of this process.
        digest: of the bank as it was read, and of its trees as they are here.
        costs: of steps, as the probe found them and as the bank had them; ``None`` where it has
            none.
    """

    bank: Bank
    digest: str = ""
    costs: dict[str, Any] | None = None


def load_banks(
    names: Iterable[str],
    engine: Engine,
    tasks: Iterable[str],
    cache: Path,
    temperature: float | None = None,
) -> dict[str, TaskBank]:
    """Banks by task; ``""`` is for all tasks without one of their own.

    Args:
        names: ``NAME``, ``FILE``, ``TASK=NAME`` or ``TASK=FILE`` each.
        engine: whose target, heads and process they are adapted to.
        tasks: names of those that are measured.
        cache: folder in which banks fitted to other machines are kept.
        temperature: whose costs they get; ``None`` is that of their calibration.

    Raises:
        InputError: a task that is not measured, two banks for one, or heads that cannot use any.
        BankError: a bank that cannot be read, or belongs to another model or other heads.
    """
    known = list(tasks)
    banks: dict[str, TaskBank] = {}
    for given in names:
        if isinstance(engine.drafter, EmptyDrafter):
            raise InputError(f"bank {given!r:.80}: the drafter is none, which fills no trees")
        before, sign, after = given.partition("=")
        task, name = (before, after) if sign and not Path(given).exists() else ("", given)
        if task and task not in known:
            raise InputError(
                f"bank {given!r:.80} is for task {task!r}; this run measures {', '.join(known)}"
            )
        if task in banks:
            raise InputError(f"bank {given!r:.80}: {task or 'all tasks'} has a bank already")
        bank = load_bank(name)
        adapted = adapt_bank(bank, engine, cache, temperature)
        banks[task] = TaskBank(adapted, bank_digest(bank, adapted), found_costs(bank, adapted))
    return banks


def bank_digest(bank: Bank, adapted: Bank) -> str:
    """Of a bank as it was read, and of its trees as they are here.

    Trees that were chosen anew for this machine may bear old names. Costs do not count: they are
    others in every process.
    """
    trees = {name: tree.paths for name, tree in adapted.entries.items()}
    text = bank.to_json() + json.dumps(trees)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def found_costs(bank: Bank, adapted: Bank) -> dict[str, Any] | None:
    """Milliseconds by rows, as this process found them and as the bank had them.

    ``check_ms`` is forward and rest at the smallest context, ``draft_ms`` drafting by depth;
    ``None`` for a bank without costs.
    """
    if bank.calibration is None or adapted.calibration is None:
        return None
    then, now = bank.calibration.costs, adapted.calibration.costs
    rows, context = now.rows, now.contexts[0]

    def described(costs: CostTable) -> dict[str, Any]:
        check_ms = [costs.forward(size, context) + costs.rest(size) for size in rows]
        return {"check_ms": check_ms, "draft_ms": list(costs.draft_ms)}

    return {
        "context": context,
        "rows": list(rows),
        **described(now),
        "as_calibrated": described(then),
    }
