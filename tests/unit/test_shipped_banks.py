"""The banks in the package belong to the heads in the package, and say what pays."""

import pytest

from entmtp.bank import NONE, load_bank, shipped_banks
from entmtp.calibrate.summary import unpack_trace
from entmtp.drafters.checkpoint import heads_digest, load_heads
from entmtp.loading.drafters import source_of
from entmtp.scheduler import POLICIES
from entmtp.scheduler.registry import best_policy
from entmtp.workload import TASKS, read_workload

MODEL = "smollm2-135m"


def test_there_is_one_a_task() -> None:
    """Under the names of the tasks."""
    assert set(shipped_banks()) == set(TASKS)


@pytest.fixture(scope="module")
def digest() -> str:
    """Of the heads that are used where none are named."""
    source = source_of("auto", MODEL)
    assert source is not None
    return heads_digest(load_heads(source.path, hidden_size=576, vocab_size=49152, target=MODEL))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_bank_is_of_the_default_heads_and_of_its_whole_task(name: str, digest: str) -> None:
    """Heads that are trained anew need banks that are made anew."""
    bank = load_bank(name)
    calibration = bank.calibration
    assert calibration is not None
    assert (calibration.source.model, calibration.source.drafter) == (MODEL, "hydra")
    assert calibration.source.drafter_digest == digest
    assert calibration.settings["verification"] == "exact"
    trace = unpack_trace(calibration.trace)
    records = read_workload(name)
    assert sorted(trace.tasks) == sorted(record.task for record in records)
    assert NONE in bank.entries
    assert bank.entries[bank.best].num_nodes > 0
    assert best_policy(calibration.policies) in POLICIES
    measured = [s.time_ratio for s in bank.scores.values() if s.time_ratio is not None]
    assert measured
    assert all(0.95 <= ratio <= 1.05 for ratio in measured)
    assert shipped_banks()[name].stat().st_size < 2e6
