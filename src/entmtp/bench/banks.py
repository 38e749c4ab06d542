"""Banks as they are named on the command line: one for all tasks, or one for each."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from entmtp.bank import Bank, load_bank
from entmtp.calibrate.adapt import adapt_bank
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine
from entmtp.errors import InputError

__all__ = ["load_banks"]


def load_banks(
    names: Iterable[str], engine: Engine, tasks: Iterable[str], cache: Path
) -> tuple[dict[str, Bank], dict[str, str]]:
    """Banks and their digests by task; ``""`` is for all tasks without one of their own.

    Args:
        names: ``NAME``, ``FILE``, ``TASK=NAME`` or ``TASK=FILE`` each.
        engine: whose target, heads and process they are adapted to.
        tasks: names of those that are measured.
        cache: folder in which banks fitted to other machines are kept.

    Raises:
        InputError: a task that is not measured, two banks for one, or heads that cannot use any.
        BankError: a bank that cannot be read, or belongs to another model or other heads.
    """
    known = list(tasks)
    banks: dict[str, Bank] = {}
    digests: dict[str, str] = {}
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
        digests[task] = hashlib.sha256(bank.to_json().encode()).hexdigest()[:16]
        banks[task] = adapt_bank(bank, engine, cache)
    return banks, digests
