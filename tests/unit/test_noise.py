"""The fast way to noise and to the tokens that it decides, against the slow one, bit for bit."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entmtp import noise as noise_module
from entmtp.kernels.library import Library
from entmtp.noise import NoiseSource
from entmtp.params import SamplingParams
from entmtp.sampling import (
    choose_token,
    gumbel,
    gumbel_noise,
    philox,
    rough_gumbel,
    tempered,
    token_scores,
)
from native_cases import ISAS, LIBRARY, needs_library

CPU = torch.device("cpu")
VOCAB = 49_152
Row = npt.NDArray[np.float64]
SEED = 2**40 + 3


def flat(size: int, rng: np.random.Generator) -> Row:
    """All scores equal: the noise alone decides."""
    return np.full(size, rng.integers(-3, 3))


def peaked(size: int, rng: np.random.Generator) -> Row:
    """A few likely tokens, as a model gives."""
    return rng.standard_normal(size) * 3 + 9 * (rng.random(size) < 0.01)


def spread(size: int, rng: np.random.Generator) -> Row:
    """Differences of any size."""
    return -(10.0 ** rng.uniform(-6, 38, size))


def masked(size: int, rng: np.random.Generator) -> Row:
    """What top-k and top-p leave: most are dropped."""
    return np.where(rng.random(size) < 0.9, -np.inf, rng.standard_normal(size))


def alone(size: int, rng: np.random.Generator) -> Row:
    """A single token is left."""
    row = np.full(size, -np.inf)
    row[rng.integers(size)] = rng.standard_normal()
    return row


def coarse(size: int, rng: np.random.Generator) -> Row:
    """So large that the noise is rounded away: many sums are equal."""
    return rng.integers(-1, 2, size) * 2.0**30


def rising(size: int, _: np.random.Generator) -> Row:
    """Every score beats all before it."""
    return np.arange(size) / 100


def odd(size: int, rng: np.random.Generator) -> Row:
    """What no model should give: NaN and infinities among others."""
    values = np.array([0.0, 1.0, np.nan, np.inf, -np.inf])
    return rng.choice(values, size, p=rng.dirichlet(np.full(5, 0.3)))


ROWS = (flat, peaked, spread, masked, alone, coarse, rising, odd)
Rows = Callable[[int, np.random.Generator], Row]


def make_row(rows: Rows, size: int, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rows(size, rng).astype(np.float32))


def torch_words(seed: int, position: int, count: int) -> Tensor:
    """The words as :func:`gumbel_noise` takes them."""
    blocks = torch.arange((count + 3) // 4)
    return philox((blocks, position, position >> 32, 0), seed).reshape(-1)[:count]


def library_of(isa: str) -> Library:
    """The library as it is on a CPU whose best instruction set is this one."""
    assert LIBRARY is not None
    return Library(LIBRARY.lib, (isa,))


# -- words and bounds of the library ---------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 1100))
def test_words_equal_those_of_torch(isa: str, seed: int, position: int, count: int) -> None:
    """Seeds and positions are used whole; the last block and the last chunk may be cut."""
    words = library_of(isa).noise_words(seed, position, count)
    assert words.tolist() == torch_words(seed, position, count).tolist()


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", ROWS)
def test_no_id_that_can_win_is_left_out(isa: str, rows: Rows) -> None:
    """All ids whose sum is the greatest are offered, rising, with their words."""
    library, rng = library_of(isa), np.random.default_rng(5)
    for position, size in enumerate([*range(1, 51), *rng.integers(51, 3000, 100)]):
        row = make_row(rows, int(size), rng)
        found = library.noise_candidates(SEED, position, row.numpy())
        assert found is not None
        ids, words, scores = found
        assert np.array_equal(scores, row.numpy()[ids], equal_nan=True)
        sums = row + gumbel_noise(SEED, position, int(size))
        best = torch.nonzero((sums == sums.max()) | sums.isnan()).reshape(-1).tolist()
        assert set(best) <= set(ids.tolist())
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert words.tolist() == torch_words(SEED, position, int(size))[ids].tolist()


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_few_ids_are_offered(isa: str) -> None:
    """Of a whole vocabulary a handful: the bounds are near the noise where it is large."""
    library, rng = library_of(isa), np.random.default_rng(6)
    row = make_row(peaked, VOCAB, rng).numpy()
    every = [library.noise_candidates(SEED, i, row) for i in range(50)]
    found = [len(one[0]) for one in every if one is not None]
    assert len(found) == 50
    assert np.mean(found) < 1.1
    assert max(found) < 4


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_ids_with_equal_sums_are_all_offered(isa: str) -> None:
    """Scores that undo the noise leave ties to the last bit; the largest noise is among it."""
    library = library_of(isa)
    largest = [
        position
        for position in range(3000)
        if library.noise_words(SEED, position, VOCAB).max() >= 2**32 - 2**8
    ]
    assert largest
    for position in [*range(20), *largest]:
        noise = gumbel_noise(SEED, position, VOCAB)
        for shift in (0.0, 1.0, 60.0):
            row = shift - noise
            sums = row + noise
            found = library.noise_candidates(SEED, position, row.numpy())
            assert found is not None
            ids = found[0]
            assert set(torch.nonzero(sums == sums.max()).reshape(-1).tolist()) <= set(ids.tolist())


# -- noise -----------------------------------------------------------------------------------------


def test_noise_of_a_word_ignores_its_company() -> None:
    """Torch's logarithm gives the same bits in long and in short rows: over three million words."""
    rng = np.random.default_rng(7)
    for size in (VOCAB, 32_003, 262_144):
        words = torch.from_numpy(rng.integers(0, 2**32, size))
        expected = gumbel(words)
        for count in [*range(1, 40), 1001, size - 1]:
            first = int(rng.integers(0, size - count + 1))
            part = slice(first, first + count)
            assert torch.equal(gumbel(words[part].clone()), expected[part])
            chosen = torch.from_numpy(rng.integers(0, size, count))
            assert torch.equal(gumbel(words[chosen]), expected[chosen])


def test_noise_of_words_of_any_type() -> None:
    """uint32 from the library, int64 from torch."""
    words = np.random.default_rng(8).integers(0, 2**32, VOCAB)
    unsigned = torch.from_numpy(words.astype(np.uint32))
    assert torch.equal(gumbel(unsigned), gumbel(torch.from_numpy(words)))


@pytest.mark.parametrize("size", [1, 50, 1027, VOCAB])
def test_rows_of_noise_are_those_of_the_slow_way(size: int) -> None:
    """Asked again and again, in any order, with more positions than are kept."""
    source = NoiseSource(SEED, size)
    for position in [5, 6, 5, 7, *range(40), 5, 39, 2**33]:
        assert torch.equal(source.at(position, CPU), gumbel_noise(SEED, position, size))
    assert source.at(39, CPU) is source.at(39, CPU)


# -- tokens ----------------------------------------------------------------------------------------


@pytest.fixture(params=["library", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the library, and as if it had not been built."""
    if request.param == "torch":
        monkeypatch.setattr(noise_module, "load_library", lambda: None)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", [range(1, 51), [VOCAB]], ids=["small", "large"])
def test_the_best_is_the_arg_max_of_the_row(rows: Rows, sizes: list[int]) -> None:
    """Whatever the scores, and whether or not the noise of a position is there already."""
    rng = np.random.default_rng(9)
    for number in range(300 if len(sizes) > 1 else 10):
        size = int(rng.choice(sizes))
        position = int(rng.integers(2**40))
        row = make_row(rows, size, rng)
        expected = int(torch.argmax(row + gumbel_noise(number, position, size)))
        source = NoiseSource(number, size)
        assert source.best(row, position) == expected
        source.at(position, CPU)
        assert source.best(row, position) == expected


@pytest.mark.usefixtures("way")
def test_the_best_of_a_part_of_a_tensor() -> None:
    """A row whose numbers do not lie side by side."""
    rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    row = rows[:, 1]
    expected = int(torch.argmax(row + gumbel_noise(4, 2, 64)))
    assert NoiseSource(4, 64).best(row, 2) == expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=1.3, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(),
    ],
    ids=["plain", "cut", "cold", "penalties", "greedy"],
)
def test_tokens_are_the_arg_max_of_their_scores(params: SamplingParams) -> None:
    """`choose_token` with the noise of a sequence, without it, and the row that says why."""
    rng = np.random.default_rng(10)
    source, history = NoiseSource(SEED, 3001), ([1, 5], [7, 7, 3000])
    for position in range(30):
        logits = make_row(peaked, 3001, rng)
        scores = token_scores(logits, params, SEED, position, history)
        expected = int(torch.argmax(scores))
        assert choose_token(logits, params, SEED, position, history, source) == expected
        assert choose_token(logits, params, SEED, position, history) == expected


@pytest.mark.parametrize("has_library", [True, False])
def test_noise_of_some_ids_is_nearly_that_of_the_whole_row(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits again and again, for other ids, and by the library and torch."""
    if not has_library:
        monkeypatch.setattr("entmtp.noise.load_library", lambda: None)
    source = NoiseSource(77, 1000)
    for ids in (torch.tensor([5, 999, 0, 3]), torch.arange(0, 1000, 7)):
        for position in (3, 2**40, 3, *range(40)):
            found = source.of(position, ids)
            assert torch.equal(found, rough_gumbel(torch_words(77, position, 1000)[ids]))
            exact = gumbel_noise(77, position, 1000)[ids]
            torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


def test_rough_noise_is_near_the_noise() -> None:
    """From -2 on; the largest is that of the last word, and too small a word has none."""
    words = torch.from_numpy(np.random.default_rng(13).integers(0, 2**32, 10**6))
    words = words[gumbel(words) > -2]
    torch.testing.assert_close(rough_gumbel(words), gumbel(words), atol=1e-4, rtol=1e-5)
    ends = torch.tensor([0, 2**31, 2**32 - 2, 2**32 - 1])
    assert rough_gumbel(ends).argmax() == len(ends) - 1
    torch.testing.assert_close(rough_gumbel(ends[1:]), gumbel(ends[1:]), atol=1e-5, rtol=1e-6)
    assert rough_gumbel(ends)[0] == -torch.inf
    assert torch.equal(rough_gumbel((2**32 - 1 - words).to(torch.float32)), rough_gumbel(words))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("temperature", [1e-40, 0.7, 1.0, 3.0])
def test_the_best_of_tempered_logits(rows: Rows, temperature: float) -> None:
    """The scores need not be made, and the words may be there already; only NaN has no best."""
    rng, ids = np.random.default_rng(12), torch.arange(0, 3, 2)
    for position in range(150):
        logits = make_row(rows, int(rng.integers(3, 2000)), rng)
        scores = tempered(logits, temperature)
        if scores.isnan().any():
            continue
        source = NoiseSource(SEED, len(logits))
        expected = int(torch.argmax(scores + gumbel_noise(SEED, position, len(logits))))
        assert source.best_tempered(logits, temperature, position) == expected
        source.of(position, ids)
        assert source.best_tempered(logits, temperature, position) == expected
        assert source.best(scores, position) == expected
