"""What benchmarks/schedule_cost.py times and counts."""

import pytest
import torch

import schedule_cost
from entmtp.bank import Bank
from entmtp.engine import Engine
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler, LadderParams, LadderScheduler
from exactness import make_drafter
from fakes import ByteTokenizer, tiny_target
from schedule_cost import Timed

PROMPTS = [(5, 9, 2), (1, 2, 3, 4)]
SAMPLING = SamplingParams(max_new_tokens=30, ignore_eos=True)


def test_every_step_of_every_policy_is_timed_and_switches_are_marked() -> None:
    """As many steps as decoding has; an engine is left as it was."""
    target = tiny_target(seed=1, dtype=torch.float64, scale=0.3)
    plain = FixedScheduler.plain()
    engine = Engine(target, make_drafter("hydra", target, (), 4), plain, ByteTokenizer())
    ladder = LadderScheduler(Bank.shipped(), LadderParams(("none", "chain4"), (0.4,), "p0"))
    found = schedule_cost.time_schedulers(
        engine, {"fixed": plain, "ladder": ladder}, PROMPTS, SAMPLING
    )
    assert engine.times_observer is None
    for name, scheduler in (("fixed", plain), ("ladder", ladder)):
        results = [engine.generate(p, SAMPLING, scheduler=scheduler) for p in PROMPTS]
        trees = [[step.topology for step in result.stats.steps] for result in results]
        assert [step.is_switch for step in found[name]] == [
            at > 0 and own[at] != own[at - 1] for own in trees for at in range(len(own))
        ]
        assert all(step.us > 0 for step in found[name])
    assert any(step.is_switch for step in found["ladder"])


def test_a_policy_is_summed_up_beside_the_fixed_tree() -> None:
    """Medians; steps that switch by themselves, where there are any."""
    assert schedule_cost.summary([Timed(9.0, False, us) for us in (3.0, 5.0, 9.0)], 9.0) == {
        "num_steps": 3,
        "num_switches": 0,
        "median_us": 9.0,
        "over_fixed_us": 0.0,
        "at_switches_over_fixed_us": None,
        "high_us": 9.0,
        "search_us": 5.0,
    }
    steps = [Timed(us, us > 20) for us in (10.0, 12.0, 14.0, 30.0, 40.0)]
    assert schedule_cost.summary(steps, 9.0) == {
        "num_steps": 5,
        "num_switches": 2,
        "median_us": 14.0,
        "over_fixed_us": 5.0,
        "at_switches_over_fixed_us": 26.0,
        "high_us": pytest.approx(38.0),
        "search_us": None,
    }
    assert schedule_cost.summary(steps[:3], 9.0)["at_switches_over_fixed_us"] is None


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    assert schedule_cost.main(["bank.json", "--model=no-such-model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
