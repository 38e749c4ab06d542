"""Acceptance numbers made from step records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.metrics import DecodeStats, StepRecord


def stats(*steps: tuple[str, int, int], num_tokens: int = 9, decode_s: float = 2.0) -> DecodeStats:
    """Stats of steps given as (topology, drafted, accepted)."""
    records = tuple(StepRecord(*step, entropy=1.0, p0=0.5, bin=0) for step in steps)
    return DecodeStats(
        num_prompt_tokens=4,
        num_tokens=num_tokens,
        prefill_s=0.5,
        decode_s=decode_s,
        backend="torch-cpu",
        dtype="float32",
        drafter="hydra",
        policy="fixed",
        verification="exact",
        steps=records,
    )


THREE = stats(("chain4", 4, 3), ("none", 0, 0), ("chain4", 4, 2))


def test_counts_are_sums_over_steps() -> None:
    """Steps, drafted and accepted tokens add up."""
    assert (THREE.num_steps, THREE.num_drafted, THREE.num_accepted) == (3, 8, 5)


def test_mean_acceptance_length_counts_the_bonus_token() -> None:
    """It is 1 + accepted / steps: tokens emitted per target forward."""
    assert THREE.mean_acceptance_length == pytest.approx(1 + 5 / 3)


def test_acceptance_rate_is_accepted_over_drafted() -> None:
    """Steps that draft nothing do not lower it."""
    assert THREE.acceptance_rate == 5 / 8


def test_plain_decoding_accepts_nothing() -> None:
    """Without drafts the mean acceptance length is 1 and the rate is 0."""
    plain = stats(("none", 0, 0), ("none", 0, 0))
    assert (plain.mean_acceptance_length, plain.acceptance_rate) == (1.0, 0.0)


def test_a_text_of_one_token_has_no_steps() -> None:
    """Nothing is divided by zero steps, drafts or seconds."""
    one = stats(num_tokens=1, decode_s=0.0)
    assert (one.mean_acceptance_length, one.acceptance_rate) == (1.0, 0.0)
    assert (one.decode_tokens_per_s, one.topology_steps) == (0.0, {})


def test_decode_speed_leaves_the_first_token_to_prefill() -> None:
    """Nine tokens in two seconds of decoding are four a second."""
    assert THREE.decode_tokens_per_s == 4.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.just(4), st.integers(0, 4)), max_size=20))
def test_steps_of_all_topologies_add_up(steps: list[tuple[str, int, int]]) -> None:
    """Each step is counted for one topology, and mean length times steps gives the tokens."""
    made = stats(*steps)
    assert sum(made.topology_steps.values()) == made.num_steps == len(steps)
    emitted = sum(accepted + 1 for _, _, accepted in steps)
    assert made.mean_acceptance_length * made.num_steps == pytest.approx(emitted)


def test_json_form_has_every_number() -> None:
    """Counts, times, names and derived numbers are listed; single steps are not."""
    assert THREE.as_dict() == {
        "num_prompt_tokens": 4,
        "num_tokens": 9,
        "num_steps": 3,
        "num_drafted": 8,
        "num_copied": 0,
        "num_accepted": 5,
        "mean_acceptance_length": 1 + 5 / 3,
        "acceptance_rate": 5 / 8,
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "decode_tokens_per_s": 4.0,
        "backend": "torch-cpu",
        "dtype": "float32",
        "drafter": "hydra",
        "policy": "fixed",
        "verification": "exact",
        "topology_steps": {"chain4": 2, "none": 1},
    }
