"""Intervals and ratios of the bench against cases that can be worked out by hand."""

import numpy as np
import pytest

from bench_cases import make_run
from entmtp.bench.statistics import pair_ratios, speed_of, timings_of
from entmtp.bootstrap import RESAMPLES, draw_weights, percentiles


def test_draws_are_the_same_each_time_and_keep_the_size() -> None:
    """The first is the whole; each draw takes as many items as there are."""
    weights = draw_weights(7)
    assert weights.shape == (1 + RESAMPLES, 7)
    assert (weights[0] == 1).all()
    assert (weights.sum(axis=1) == 7).all()
    assert (weights == draw_weights(7)).all()


def test_one_item_has_no_interval() -> None:
    """There is nothing to draw."""
    assert draw_weights(1).tolist() == [[1.0]]
    assert percentiles(draw_weights(1)[:, 0]) is None


def test_the_bootstrap_of_two_prompts_is_binomial() -> None:
    """Of two prompts both, the one or the other come up in 1/2, 1/4 and 1/4 of the draws."""
    speed = speed_of(timings_of([make_run(0, 1.0), make_run(1, 3.0)]))
    assert speed.tokens_per_s == 8 / 4
    assert speed.ci95 == (4 / 3, 4.0)  # each is the mean of a quarter of the draws
    first = draw_weights(2)[1:, 0]
    shares = [float((first == n).mean()) for n in (0, 1, 2)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_the_interval_is_that_of_the_mean_of_many() -> None:
    """With equal texts the bootstrap agrees with the standard error of the mean time."""
    seconds = 1 + 0.2 * np.random.default_rng(1).standard_normal(400)
    speed = speed_of(timings_of([make_run(i, float(s)) for i, s in enumerate(seconds)]))
    mean, error = seconds.mean(), seconds.std() / 20
    assert speed.ci95 is not None
    assert speed.ci95 == pytest.approx((4 / (mean + 1.96 * error), 4 / (mean - 1.96 * error)), 0.01)


def test_ratios_are_paired_by_prompt() -> None:
    """A method that takes twice as long everywhere has a ratio without a spread."""
    seconds = (0.5, 1.0, 4.0, 9.0)
    fast = timings_of([make_run(i, s) for i, s in enumerate(seconds)])
    slow = timings_of([make_run(i, 2 * s) for i, s in enumerate(seconds)])
    ratios = pair_ratios({"fast": fast, "slow": slow})
    assert list(ratios) == ["fast/slow", "slow/fast"]
    for ratio, value in ((ratios["fast/slow"], 2.0), (ratios["slow/fast"], 0.5)):
        assert (ratio.value, ratio.median, ratio.ci95) == (value, value, (value, value))
    assert speed_of(fast).ci95 is not None
    assert speed_of(fast).ci95 != (speed_of(fast).tokens_per_s,) * 2


def test_ratios_of_peers_are_over_the_prompts_of_both() -> None:
    """A peer that ran on easy prompts alone gains nothing by it."""
    plain = timings_of([make_run(0, 1.0), make_run(1, 1.0), make_run(2, 50.0)])
    peer = timings_of([make_run(0, 1.0), make_run(1, 1.0)])
    ratio = pair_ratios({"plain": plain, "hf": peer})["hf/plain"]
    assert (ratio.value, ratio.num_prompts) == (1.0, 2)


def test_the_time_of_a_prompt_is_the_median_of_its_repeats() -> None:
    """A spell in which the machine was busy does not count."""
    runs = [make_run(0, s, repeat=r) for r, s in enumerate((2.0, 90.0, 1.9))]
    assert speed_of(timings_of(runs)).tokens_per_s == 4 / 2.0


def test_texts_of_one_token_have_no_speed() -> None:
    """Nothing was decoded after the prompt."""
    timings = timings_of([make_run(0, 0.0, tokens=(5,))])
    assert speed_of(timings).tokens_per_s == 0.0
    assert pair_ratios({"plain": timings, "hydra": timings}) == {}
