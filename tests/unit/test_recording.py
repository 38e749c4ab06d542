"""The drafter that records: states of finished texts, whoever else is decoded beside them."""

import pytest
import torch
from torch import Tensor

from entmtp.drafters.recording import RecordingDrafter


def rows(*values: float) -> Tensor:
    """One state a value."""
    return torch.tensor(values)[:, None]


def test_a_text_that_goes_on_elsewhere_is_told_from_one_that_ended() -> None:
    """Of two answers with the same beginning, the shorter is not taken for the longer."""
    drafter = RecordingDrafter()
    long, short = (drafter.prefill([1, 2], rows(0.1, 0.2), 3) for _ in range(2))
    for state in (long, short):
        drafter.commit(state, rows(0.3), [4])
    drafter.commit(long, rows(0.4), [5])
    assert drafter.take([1, 2, 3, 4]).flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    drafter.commit(long, rows(0.5), [6])
    taken = drafter.take([1, 2, 3, 4, 5, 6]).flatten().tolist()
    assert taken == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_text_that_is_still_written_is_not_lost_with_its_twin() -> None:
    """At the moment both hold the same tokens; whichever is taken, the other can go on."""
    for going_on in (0, 1):
        drafter = RecordingDrafter()
        states = [drafter.prefill([1], rows(0.1), 2) for _ in range(2)]
        assert drafter.take([1, 2]).flatten().tolist() == pytest.approx([0.1])
        drafter.commit(states[going_on], rows(0.2), [3])
        assert drafter.take([1, 2, 3]).flatten().tolist() == pytest.approx([0.1, 0.2])


def test_what_lies_behind_a_stop_is_left_out() -> None:
    """And a text that was never recorded is named as such."""
    drafter = RecordingDrafter(torch.float16)
    state = drafter.prefill([1], rows(0.25), 2)
    drafter.commit(state, rows(0.5), [3])
    taken = drafter.take([1, 2])
    assert taken.dtype == torch.float16
    assert taken.flatten().tolist() == [0.25]
    with pytest.raises(LookupError, match="no sequence"):
        drafter.take([1, 2])
