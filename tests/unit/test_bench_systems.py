"""How an engine of this program is told about: its policy, and the plans of its steps."""

from itertools import pairwise

from bench_cases import make_run
from costs import linear_costs
from entmtp.bench.runs import Run, size_class
from entmtp.bench.summary import summarize
from entmtp.bench.systems import EngineSystem
from entmtp.bench.tasks import Task
from entmtp.engine import Engine
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler, TopologyScheduler
from entmtp.scheduler.chains import ChainThresholdParams, ChainThresholdScheduler
from entmtp.topology import Topology
from entmtp.workload import PromptRecord
from fakes import ByteTokenizer
from tiny_drafting import tiny_drafter, tiny_model

SAMPLING = SamplingParams(max_new_tokens=60, seed=3, temperature=1.0)


def decoded(scheduler: TopologyScheduler) -> Run:
    """One text of a tiny model."""
    drafter, tokenizer = tiny_drafter("torch", "hydra"), ByteTokenizer(12, ())
    system = EngineSystem(Engine(tiny_model("torch"), drafter, scheduler, tokenizer))
    return Run(0, 0, "dynamic", (system.decode((1, 2, 3), SAMPLING),))


def numbers(run: Run) -> dict[str, object]:
    """What is reported of it."""
    task = Task("chat", (PromptRecord("1", "chat", ("hello",)),), ())
    found: dict[str, object] = summarize(task, [make_run(0, 1.0), run], {})[0][run.method]
    return found


def test_trees_that_are_grown_are_told_apart_by_their_size() -> None:
    """One name once stood for all of them: shares were 100 %, and there were no switches."""
    params = ChainThresholdParams(max_code=15, max_length=4)
    run = decoded(ChainThresholdScheduler(params, linear_costs(), 100.0))
    sizes = [step.nodes for step in run.steps]
    assert [step.plan for step in run.steps] == [size_class(size) for size in sizes]
    assert [step.depth for step in run.steps] == sizes  # chains
    found = numbers(run)
    classes = {plan: round(share * len(sizes)) for plan, share in found["plan_shares"].items()}
    assert classes == {
        name: sum(size_class(size) == name for size in sizes) for name in map(size_class, sizes)
    }
    assert len(classes) > 1
    changes = sum(size_class(a) != size_class(b) for a, b in pairwise(sizes))
    assert found["num_switches"] == changes > 0
    assert found["policy"] == "chain-threshold"


def test_one_tree_has_its_name() -> None:
    """Smaller at the end of the text too."""
    run = decoded(FixedScheduler("chain3", Topology.chain(3)))
    assert {step.plan for step in run.steps} == {"chain3"}
    found = numbers(run)
    assert (found["plan_shares"], found["num_switches"]) == ({"chain3": 1.0}, 0)
    assert (found["switch_cost_ms"], found["policy"]) == (None, "fixed:chain3")
