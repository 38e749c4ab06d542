"""A block with a cache of its own: however rows come in, it holds what one pass would hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entmtp.decoder.block import DecoderBlock, Mixer
from entmtp.decoder.config import BlockConfig
from entmtp.decoder.parameters import BlockParameters
from entmtp.drafters.block_state import CHUNK, BlockInputs, BlockRows, BlockRunner, BlockState

CONFIG = BlockConfig(
    hidden_size=8, intermediate_size=12, num_heads=4, num_kv_heads=2, head_dim=4, qkv_bias=True
)


def random_block() -> DecoderBlock:
    """A block with seeded weights in float64."""
    generator = torch.Generator().manual_seed(0)
    parameters = BlockParameters(CONFIG).double()
    with torch.no_grad():
        for value in parameters.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.4)
    return parameters.build()


BLOCK = random_block()


class Counting:
    """The block, which notes the rows of each pass and fails where it is told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.passes: list[int] = []
        self._fails_at = fails_at

    def __call__(self, inputs: BlockInputs, rotation: tuple[Tensor, Tensor], mix: Mixer) -> Tensor:
        self.passes.append(len(inputs[0]))
        features = BLOCK(inputs[0], rotation, mix)
        if len(self.passes) == self._fails_at:
            raise MemoryError("no room")
        return features


def make_runner(evaluate: Counting | None = None) -> BlockRunner:
    """A runner on the CPU in float64."""
    return BlockRunner(CONFIG, evaluate or Counting(), torch.float64, torch.device("cpu"))


def random_rows(num_rows: int, seed: int = 0) -> Tensor:
    """Inputs ``(n, H)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, CONFIG.hidden_size, generator=generator, dtype=torch.float64)


@torch.inference_mode()
def read(runner: BlockRunner, *pieces: Tensor, each: bool = False) -> BlockState:
    """A sequence whose rows came in pieces; ``each`` reads them as they come."""
    state = runner.start()
    for piece in pieces:
        state.waiting.append((piece,))
        if each:
            runner.catch_up([state])
    runner.catch_up([state])
    return state


@torch.inference_mode()
def read_in_one_pass(rows: Tensor) -> BlockState:
    """The slow twin: all rows at once, whatever it costs."""
    runner = make_runner()
    state = runner.start()
    (features,) = runner.run([BlockRows(state, (rows,), np.arange(len(rows)))])
    state.feature = features[-1:]
    return state


def assert_same(state: BlockState, expected: BlockState) -> None:
    """Lengths, keys, values and the newest feature; nothing waits."""
    length = expected.cache.length
    assert (state.cache.length, state.waiting) == (length, [])
    for ours, theirs in (
        (state.cache.keys[:, :, :length], expected.cache.keys[:, :, :length]),
        (state.cache.values[:, :, :length], expected.cache.values[:, :, :length]),
        (state.feature, expected.feature),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans(), st.integers(0, 99))
@settings(max_examples=15, derandomize=True)
def test_rows_in_pieces_equal_one_pass(sizes: list[int], each: bool, seed: int) -> None:
    """Read as they come, or all when they are needed."""
    rows = random_rows(sum(sizes), seed)
    state = read(make_runner(), *torch.split(rows, sizes), each=each)
    assert_same(state, read_in_one_pass(rows))


@pytest.mark.parametrize("num_rows", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_a_long_text_is_read_in_chunks_and_equals_one_pass(num_rows: int) -> None:
    """A pass never has more rows than a chunk, so the mask stays bounded."""
    evaluate, rows = Counting(), random_rows(num_rows)
    state = read(make_runner(evaluate), rows)
    assert evaluate.passes == [min(CHUNK, num_rows - at) for at in range(0, num_rows, CHUNK)]
    assert_same(state, read_in_one_pass(rows))


def test_a_text_longer_than_the_first_table_of_rotations_is_read_rightly() -> None:
    """The table grows, and rows before and after agree with one pass."""
    rows = random_rows(2200)
    assert_same(read(make_runner(), rows[:2000], rows[2000:], each=True), read_in_one_pass(rows))


@torch.inference_mode()
def test_sequences_read_together_equal_each_alone() -> None:
    """Of different lengths, one beyond a chunk, one with nothing to read, one joining late."""
    runner, sizes = make_runner(), [3, CHUNK + 40, 1, 17]
    texts = [random_rows(size, seed) for seed, size in enumerate(sizes)]
    states = [runner.start() for _ in sizes]
    for state, text in zip(states[:3], texts, strict=False):
        state.waiting.append((text[:1],))
    runner.catch_up(states[:3])
    for state, text in zip(states, texts, strict=True):
        rest = text[state.cache.length :]
        if len(rest):
            state.waiting.append((rest,))
    runner.catch_up(states)
    for state, text in zip(states, texts, strict=True):
        assert_same(state, read_in_one_pass(text))


def test_rows_wait_until_they_are_needed() -> None:
    """Plain steps cost nothing, and where nothing waits nothing is run."""
    evaluate = Counting()
    runner = make_runner(evaluate)
    state = runner.start()
    state.waiting += [(random_rows(4),), (random_rows(1, seed=1),)]
    assert (state.cache.length, evaluate.passes) == (0, [])
    runner.catch_up([state])
    runner.catch_up([state])
    assert (state.cache.length, evaluate.passes) == (5, [5])


@torch.inference_mode()
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_rows_still_wait_where_reading_them_failed(fails_at: int) -> None:
    """They were once lost, and every later tree was drafted behind a text with a hole."""
    sizes = (2 * CHUNK + 7, 5)
    texts = [random_rows(size, seed) for seed, size in enumerate(sizes)]
    runner = make_runner(Counting(fails_at))
    states = [runner.start() for _ in texts]
    for state, text in zip(states, texts, strict=True):
        state.waiting.append((text,))
    with pytest.raises(MemoryError):
        runner.catch_up(states)
    runner.catch_up(states)
    for state, text in zip(states, texts, strict=True):
        assert_same(state, read_in_one_pass(text))


@torch.inference_mode()
def test_a_mask_hides_rows() -> None:
    """A row that sees the text and itself alone equals the next row of that text."""
    text, branches = random_rows(6), random_rows(3, seed=1)
    runner = make_runner()
    state = read(runner, text)
    mask = np.concatenate([np.ones((3, 6), dtype=np.bool_), np.eye(3, dtype=np.bool_)], axis=1)
    (features,) = runner.run([BlockRows(state, (branches,), np.full(3, 6), mask)])
    for number in range(3):
        alone = read_in_one_pass(torch.cat([text, branches[number : number + 1]]))
        torch.testing.assert_close(features[number], alone.feature[0], rtol=1e-9, atol=1e-12)
    state.cache.truncate(6)
    assert_same(state, read_in_one_pass(text))
