"""Calibration over a real Ray cluster of two workers on this machine."""

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ray_cases
from entmtp.calibrate import collect
from entmtp.calibrate.cluster import ClusterParams, WorkerSize, joined
from entmtp.calibrate.distributed import open_cluster
from entmtp.calibrate.groups import TraceSettings
from entmtp.calibrate.points import cost_table
from entmtp.calibrate.session import trace_prompts, usual_envelope
from entmtp.calibrate.timing import TimingParams, timing_points
from entmtp.errors import TraceError
from entmtp.files import holding
from entmtp.params import SamplingParams
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from ray_cases import mortal_engine, tiny_engine

pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

RECORDS = [PromptRecord(f"p{i}", "ab"[i % 2], (f"prompt {i} of {i * i}",)) for i in range(7)]
SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.7, seed=4)
TREES = [Topology.from_paths(p) for p in ([[0]], [[0], [0, 0]], [[0], [1], [0, 1]])]
QUICK = TimingParams(contexts=(32, 64), batches=(1, 2), min_rounds=2, max_rounds=2)
TWO = ClusterParams("local", 2)


def traced(output: Path, tracer: Any = None, stop_at: int | None = None) -> bytes:
    """The file of a trace, made in groups of two prompts."""
    engine = tiny_engine()
    settings = TraceSettings(SAMPLING, envelope=usual_envelope(engine.drafter))

    def progress(done: int, total: int) -> None:
        assert total == len(RECORDS)
        if stop_at is not None and done >= stop_at:
            raise KeyboardInterrupt

    trace_prompts(engine, "tiny", RECORDS, settings, progress, output=output, tracer=tracer)
    return output.read_bytes()


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of few prompts."""
    monkeypatch.setattr(collect, "GROUP", 2)


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connected to a cluster of its own, whose workers can import the engines of the tests."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(ray_cases.__file__).parent))
    with joined(TWO, WorkerSize(1)):
        yield
    gc.collect()  # Ray does not wait for its processes, of which the interpreter warns: here


@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
def test_a_trace_and_times_from_two_workers(tmp_path: Path) -> None:
    """One worker is killed, another takes its place; cut off, the run goes on here.

    The trace is that of this process, bit for bit; the table has all points.
    """
    whole = traced(tmp_path / "here")
    engine = tiny_engine()
    load = partial(mortal_engine, tmp_path / "killed")
    with open_cluster(TWO, engine, "tiny", load, is_timed=True) as cluster:
        assert traced(tmp_path / "there", cluster.trace_groups) == whole
        assert (tmp_path / "killed").exists()
        with pytest.raises(KeyboardInterrupt):
            traced(tmp_path / "cut", cluster.trace_groups, stop_at=3)
        parts = tmp_path / "cut.parts"
        assert 1 <= len(list(parts.glob("0*"))) < 4
        assert traced(tmp_path / "cut") == whole
        points = timing_points(engine, TREES, QUICK)
        costs = cost_table(cluster.time_points(points, QUICK))
    assert (costs.rows, costs.contexts, costs.batches) == ((1, 2, 3, 4), (32, 64), (1, 2))


def test_two_runs_do_not_write_the_same_trace(tmp_path: Path) -> None:
    """The second one is told; once the first has ended it goes on."""
    with (
        holding(tmp_path / "it.parts"),
        pytest.raises(TraceError, match="another run is at work there"),
    ):
        traced(tmp_path / "it")
    assert traced(tmp_path / "it")
