"""From logits to a token: parameters, the generator, the noise, warps and their distributions."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp.errors import InputError
from entmtp.params import MAX_SEED, SamplingParams, TypicalParams
from entmtp.sampling import (
    choose_token,
    derive_seed,
    draw_seed,
    entropy_and_top1,
    greedy_tokens,
    gumbel,
    gumbel_noise,
    penalize,
    philox,
    stable_top_k,
    token_scores,
    warp,
)
from strategies import logits_rows, sampling_params

NO_HISTORY: tuple[list[int], list[int]] = ([], [])
NUM_DRAWS = 20_000
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.25, 1.5, -3.0, 0.75])
COMBINATIONS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2),
    "cold top-k top-p": SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
    "all": SamplingParams(temperature=1.5, top_k=5, top_p=0.95, min_p=0.3),
}
Words = tuple[int, int, int, int]


# -- slow twins ------------------------------------------------------------------------------------


def philox_twin(counter: Sequence[int], key: int) -> list[int]:
    """Philox4x32-10 in whole numbers of unlimited size."""
    c0, c1, c2, c3 = counter
    k0, k1 = key % 2**32, key // 2**32
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def noise_twin(seed: int, positions: range, num_tokens: int) -> npt.NDArray[np.float64]:
    """Gumbel noise ``(positions, V)`` of many positions at once, in unsigned numpy words."""
    blocks = np.arange(-(-num_tokens // 4), dtype=np.uint64)
    c0, c1 = (grid.ravel() for grid in np.meshgrid(blocks, np.array(positions, np.uint64)))
    c2, c3 = c1 >> np.uint64(32), np.zeros_like(c0)
    c1 = c1 & np.uint64(0xFFFFFFFF)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    for i in range(10):
        k0 = np.uint64((seed + i * 0x9E3779B9) % 2**32)
        k1 = np.uint64((seed // 2**32 + i * 0xBB67AE85) % 2**32)
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
    words = np.stack((c0, c1, c2, c3), axis=1).reshape(len(positions), -1)[:, :num_tokens]
    return -np.log(-np.log((words + 0.5) / 2**32))


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """What the warps leave of a distribution, step by step on (id, probability) pairs."""

    def normalised(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
        total = sum(p for _, p in pairs)
        return [(i, p / total) for i, p in pairs]

    peak = max(logits)
    pairs = [(i, math.exp((x - peak) / params.temperature)) for i, x in enumerate(logits)]
    pairs = normalised(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
    if params.top_k:
        pairs = normalised(pairs[: params.top_k])
    kept, mass = [], 0.0
    for pair in pairs:
        if mass < params.top_p:
            kept.append(pair)
            mass += pair[1]
    kept = [(i, p) for i, p in kept if p >= params.min_p * kept[0][1]]
    left = dict(normalised(kept))
    return [left.get(i, 0.0) for i in range(len(logits))]


def p_value(counts: npt.NDArray[np.int64], probs: Sequence[float]) -> float:
    """Chance of counts at least as far from the probabilities (chi-square)."""
    expected = np.array(probs) * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    far = (((counts - expected) ** 2)[possible] / expected[possible]).sum()
    freedom = torch.tensor((possible.sum() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(far / 2, dtype=torch.float64)))


@pytest.fixture(scope="module")
def noise() -> npt.NDArray[np.float64]:
    """Noise of 20,000 neighbouring positions of one sequence."""
    return noise_twin(1234, range(NUM_DRAWS), LOGITS.numel())


# -- generator and noise ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: Words, key: int, expected: str) -> None:
    """The vectors published with Random123 come out."""
    words = philox(counter, key)[0].tolist()
    assert " ".join(f"{word:08x}" for word in words) == expected
    assert philox_twin(counter, key) == words


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    st.tuples(*[st.integers(0, 2**32 - 1)] * 3),
    st.integers(0, 2**64 - 1),
)
def test_philox_equals_its_twin(first: list[int], others: tuple[int, int, int], key: int) -> None:
    """Wrapping 64-bit products give what whole numbers of unlimited size give."""
    got = philox((torch.tensor(first), *others), key).tolist()
    assert got == [philox_twin((word, *others), key) for word in first]


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, MAX_SEED])
@pytest.mark.parametrize("position", [0, 7, 2**32 - 1, 2**32, 2**40 + 3])
def test_noise_equals_its_twin(seed: int, position: int) -> None:
    """Seeds and positions beyond 32 bits are used whole."""
    expected = noise_twin(seed, range(position, position + 1), 6)[0]
    assert gumbel_noise(seed, position, 6).numpy() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=20)
@given(st.integers(0, MAX_SEED), st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 9))
def test_noise_of_a_token_ignores_the_vocabulary(
    seed: int, position: int, size: int, more: int
) -> None:
    """It is a function of seed, position and token id alone."""
    longer = gumbel_noise(seed, position, size + more)
    assert torch.equal(gumbel_noise(seed, position, size), longer[:size])


def test_noise_changes_with_seed_and_position() -> None:
    """Positions and seeds that differ in any bit have noise of their own."""
    keys = [(0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**32), (1, 1)]
    rows = {tuple(gumbel_noise(seed, position, 4).tolist()) for seed, position in keys}
    assert len(rows) == len(keys)


def test_noise_is_finite_at_the_extremes() -> None:
    """The smallest and the largest word give finite noise, and in order."""
    low, next_low, next_high, high = gumbel(torch.tensor([0, 1, 2**32 - 2, 2**32 - 1])).tolist()
    assert -3.2 < low < next_low < next_high < high < 22.9


def test_noise_has_the_gumbel_distribution(noise: npt.NDArray[np.float64]) -> None:
    """Its mean is Euler's constant, its variance pi squared over 6, within five errors."""
    error = math.pi / math.sqrt(6 * noise.size)
    assert abs(noise.mean() - 0.5772156649) < 5 * error
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.03)


# -- seeds -----------------------------------------------------------------------------------------


def test_drawn_seeds_are_short_and_differ() -> None:
    """A seed from the operating system has at most 32 bits."""
    seeds = {draw_seed() for _ in range(20)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_derived_seeds_differ() -> None:
    """Rows of a batch, and rows of neighbouring seeds, all get seeds of their own."""
    seeds = {derive_seed(seed, row) for seed in range(100) for row in range(1, 101)}
    assert len(seeds) == 10_000
    assert all(SamplingParams(seed=seed) for seed in seeds)


@given(st.integers(0, MAX_SEED))
def test_the_first_row_keeps_the_seed(seed: int) -> None:
    """A batch of one is the single run."""
    assert derive_seed(seed, 0) == seed
    assert 0 <= derive_seed(seed, 1) <= MAX_SEED


# -- top k -----------------------------------------------------------------------------------------

VALUES = st.one_of(st.integers(-1, 1).map(float), st.sampled_from([-0.0, -math.inf, 1e30]))


@given(st.data(), st.integers(1, 3), st.integers(1, 12))
def test_stable_top_k_equals_a_stable_sort(data: st.DataObject, rows: int, size: int) -> None:
    """Ties go to the lower index, in every row, up to k = V."""
    row = st.lists(VALUES, min_size=size, max_size=size)
    values = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    k = data.draw(st.integers(1, size))
    top, index = stable_top_k(values, k)
    order = [sorted(range(size), key=lambda i, v=v: (-v[i], i))[:k] for v in values.tolist()]
    assert index.tolist() == order
    assert torch.equal(top, values.gather(1, index))


def test_stable_top_k_of_one_row() -> None:
    """A vector gives vectors; a tie across the border is cut after the lower index."""
    top, index = stable_top_k(torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0]), 3)
    assert (top.tolist(), index.tolist()) == ([3.0, 2.0, 1.0], [1, 3, 0])


# -- penalties -------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 5), max_size=8)


def penalize_twin(
    logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int]
) -> list[float]:
    """One token id at a time."""
    out = []
    for token, value in enumerate(logits):
        if token in prompt or token in generated:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        if token in generated:
            count = generated.count(token)
            value -= params.presence_penalty + params.frequency_penalty * count
        out.append(value)
    return out


@given(logits_rows(min_size=6, max_size=6), sampling_params(), TOKENS, TOKENS)
def test_penalties_equal_their_twin(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], generated: list[int]
) -> None:
    """Repetition counts prompt and text once, the other two the text alone."""
    before = logits.clone()
    expected = penalize_twin(logits.tolist(), params, prompt, generated)
    got = penalize(logits, params, prompt, generated)
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert torch.equal(logits, before)


def test_the_prompt_is_counted_by_repetition_alone() -> None:
    """Presence and frequency leave the tokens of the prompt alone."""
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert penalize(torch.ones(3), params, [0, 1, 1], [2]).tolist() == [1.0, 1.0, -1.0]


def test_repetition_lowers_positive_and_negative_logits() -> None:
    """A repeated token becomes less probable whatever its sign, however often it occurs."""
    params = SamplingParams(repetition_penalty=2.0)
    got = penalize(torch.tensor([4.0, -4.0, 4.0]), params, [0, 0], [1, 1])
    assert got.tolist() == [2.0, -8.0, 4.0]


def test_a_token_is_penalised_by_its_own_history_only() -> None:
    """Tokens of siblings are no part of the history, so they change nothing."""
    params = SamplingParams(frequency_penalty=5.0)
    logits = torch.tensor([1.0, 0.9, 0.0])
    chosen = [choose_token(logits, params, 0, 1, ([], path)) for path in ([0], [1], [])]
    assert chosen == [1, 0, 0]


# -- warps -----------------------------------------------------------------------------------------


def kept(logits: Sequence[float], **changes: float) -> list[int]:
    """Token ids that the warps leave at temperature 1."""
    params = SamplingParams(**{"temperature": 1.0, **changes})  # type: ignore[arg-type]
    return torch.isfinite(warp(torch.tensor(logits), params)).nonzero().flatten().tolist()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_warped_probabilities_equal_their_twin(name: str) -> None:
    """Temperature, top-k, top-p and min-p, alone and together, in this order."""
    params = COMBINATIONS[name]
    expected = probabilities(LOGITS.tolist(), params)
    got = torch.softmax(warp(LOGITS, params), dim=0)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_warps_leave_the_logits_alone() -> None:
    """The row is read again by other code after a token was chosen."""
    before = LOGITS.clone()
    warp(LOGITS, COMBINATIONS["all"])
    assert torch.equal(LOGITS, before)


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    """Exactly k tokens are left, even where more are equally probable."""
    assert kept([1.0, 2.0, 1.0, 1.0], top_k=2) == [0, 1]


@pytest.mark.parametrize("top_k", [0, 3, 4])
def test_top_k_of_the_whole_vocabulary_keeps_all(top_k: int) -> None:
    """0 switches it off, and so does a k of at least V."""
    assert kept([1.0, 2.0, 1.0], top_k=top_k) == [0, 1, 2]


@pytest.mark.parametrize(("top_p", "tokens"), [(0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1])])
def test_top_p_stops_where_the_mass_is_reached(top_p: float, tokens: list[int]) -> None:
    """A mass that is reached exactly takes no further token."""
    assert kept([3.0, 3.0, 3.0, 3.0], top_p=top_p) == tokens


@pytest.mark.parametrize("top_p", [1e-3, 1e-9, 1e-40, 1e-50, math.ulp(0.0)])
def test_tiny_top_p_leaves_one_token(top_p: float) -> None:
    """However small the nucleus, the most probable token is in it."""
    assert kept([0.5, 2.0, 2.0, 1.0], top_p=top_p) == [1]


@pytest.mark.parametrize(("min_p", "tokens"), [(0.0, [0, 1, 2]), (0.3, [0, 1]), (1.0, [1])])
def test_min_p_is_a_share_of_the_most_probable(min_p: float, tokens: list[int]) -> None:
    """At 1 only tokens as probable as the best are left."""
    assert kept([1.0, 2.0, 0.0], min_p=min_p) == tokens


def test_min_p_of_one_keeps_ties() -> None:
    """Tokens as probable as the best are not less probable."""
    assert kept([2.0, 2.0, 0.0], min_p=1.0) == [0, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-60, math.ulp(0.0)])
def test_tiny_temperatures_choose_the_most_probable(temperature: float) -> None:
    """Towards 0 the text becomes the greedy one; nothing overflows."""
    params = SamplingParams(temperature=temperature)
    logits = torch.tensor([0.0, 2.0, 3.0, -40.0])
    assert {choose_token(logits, params, 5, i, NO_HISTORY) for i in range(20)} == {2}


@settings(max_examples=50)
@given(logits_rows(), sampling_params(penalties=False), st.integers(0, 1000))
def test_a_chosen_token_was_not_dropped(
    logits: torch.Tensor, params: SamplingParams, position: int
) -> None:
    """Whatever the parameters, some token is left, and one of those is chosen."""
    scores = token_scores(logits, params, 3, position, NO_HISTORY)
    token = choose_token(logits, params, 3, position, NO_HISTORY)
    assert math.isfinite(scores[token])
    assert not scores.isnan().any()


# -- tokens ----------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(logits_rows(num_rows=3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_greedy_tokens_equal_choose_token(logits: torch.Tensor, dtype: torch.dtype) -> None:
    """All rows at once give what one row at a time gives; ties go to the lower id."""
    logits = logits.to(dtype)
    alone = [choose_token(row, SamplingParams(), 0, 0, NO_HISTORY) for row in logits]
    assert greedy_tokens(logits).tolist() == alone
    assert alone == [row.index(max(row)) for row in logits.tolist()]


def test_greedy_ignores_seed_and_position() -> None:
    """At temperature 0 no noise is drawn."""
    chosen = {choose_token(LOGITS, SamplingParams(), s, s, NO_HISTORY) for s in range(5)}
    assert chosen == {2}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_choose_token_is_warp_plus_noise(name: str, noise: npt.NDArray[np.float64]) -> None:
    """The rule of the distribution tests below is the rule of decoding."""
    params = COMBINATIONS[name]
    scores = warp(LOGITS, params).numpy() + noise[:30]
    chosen = [choose_token(LOGITS, params, 1234, i, NO_HISTORY) for i in range(30)]
    assert chosen == scores.argmax(axis=1).tolist()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_tokens_have_the_targets_distribution(name: str, noise: npt.NDArray[np.float64]) -> None:
    """Over 20,000 positions, chi-square sees no difference from the exact probabilities."""
    params = COMBINATIONS[name]
    tokens = (warp(LOGITS, params).numpy() + noise).argmax(axis=1)
    counts = np.bincount(tokens, minlength=LOGITS.numel())
    assert p_value(counts, probabilities(LOGITS.tolist(), params)) > 1e-3


def test_neighbouring_positions_are_independent(noise: npt.NDArray[np.float64]) -> None:
    """Pairs of tokens at neighbouring positions have the product of their probabilities."""
    params, size = COMBINATIONS["plain"], LOGITS.numel()
    tokens = (warp(LOGITS, params).numpy() + noise).argmax(axis=1)
    counts = np.bincount(tokens[::2] * size + tokens[1::2], minlength=size**2)
    probs = np.array(probabilities(LOGITS.tolist(), params))
    assert p_value(counts, np.outer(probs, probs).ravel().tolist()) > 1e-3


def test_penalties_come_before_the_warps() -> None:
    """A penalised token can fall out of the top k."""
    params = SamplingParams(temperature=1.0, top_k=1, presence_penalty=3.0)
    assert choose_token(LOGITS, params, 0, 9, ([], [2])) == 4


# -- signals ---------------------------------------------------------------------------------------


@given(logits_rows(num_rows=2))
def test_entropy_and_top1_equal_the_formulas(logits: torch.Tensor) -> None:
    """H = -sum p log p in nats and max p, as float64 gives them."""
    x = logits.double().numpy()
    p = np.exp(x - x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
    entropy, top1 = entropy_and_top1(logits)
    tolerance = 1e-5 + 1e-6 * np.abs(x).max()
    assert entropy.numpy() == pytest.approx(-terms.sum(axis=1), abs=tolerance)
    assert top1.numpy() == pytest.approx(p.max(axis=1), abs=tolerance)


@pytest.mark.parametrize(
    ("row", "entropy", "top1"),
    [([1000.0, 0.0, -1000.0], 0.0, 1.0), ([7.0] * 8, math.log(8), 1 / 8), ([3.0], 0.0, 1.0)],
    ids=["one-hot", "uniform", "one token"],
)
def test_entropy_at_the_extremes(row: list[float], entropy: float, top1: float) -> None:
    """A certain token has entropy 0, equally probable ones log V; it is never negative."""
    got = [float(value) for value in entropy_and_top1(torch.tensor(row))]
    assert got == [pytest.approx(entropy, abs=1e-6), pytest.approx(top1, abs=1e-6)]
    assert got[0] >= 0


def test_entropy_of_half_precision_logits_is_float32() -> None:
    """Signals are computed in float32 from any dtype and keep the leading shape."""
    entropy, top1 = entropy_and_top1(torch.zeros(2, 3, 16, dtype=torch.bfloat16))
    assert entropy.dtype == top1.dtype == torch.float32
    assert entropy.shape == top1.shape == (2, 3)
    assert entropy.tolist() == [[pytest.approx(math.log(16))] * 3] * 2


# -- parameters ------------------------------------------------------------------------------------

BAD_VALUES = [
    ("max_new_tokens", 0, "max_new_tokens is 0; it must be at least 1"),
    ("max_new_tokens", 1.5, "max_new_tokens is 1.5; it must be a whole number"),
    ("temperature", -0.1, "temperature is -0.1; it must be 0"),
    ("temperature", math.nan, "temperature is nan; it must be a finite number"),
    ("temperature", math.inf, "temperature is inf; it must be a finite number"),
    ("temperature", "hot", "temperature is 'hot'; it must be a finite number"),
    ("top_k", -1, "top_k is -1; it must be 0"),
    ("top_k", 2.5, "top_k is 2.5; it must be a whole number"),
    ("top_p", 0, "top_p is 0; it must be above 0 and at most 1"),
    ("top_p", 1.01, "top_p is 1.01; it must be above 0 and at most 1"),
    ("top_p", math.nan, "top_p is nan; it must be a finite number"),
    ("top_p", None, "top_p is None; it must be a finite number"),
    ("min_p", -0.1, "min_p is -0.1; it must be between 0 and 1"),
    ("min_p", 1.5, "min_p is 1.5; it must be between 0 and 1"),
    ("repetition_penalty", 0.0, "repetition_penalty is 0.0; it must be above 0"),
    ("presence_penalty", math.inf, "presence_penalty is inf; it must be a finite number"),
    ("frequency_penalty", math.nan, "frequency_penalty is nan; it must be a finite number"),
    ("seed", -1, "seed is -1; it must be between 0 and 2"),
    ("seed", 2**63, "seed is 9223372036854775808; it must be between 0 and 2"),
    ("seed", 1.0, "seed is 1.0; it must be a whole number"),
    ("stop", "END", "stop is 'END'; it must be a tuple of non-empty strings"),
    ("stop", ("a", ""), "it must be a tuple of non-empty strings"),
    ("stop", (b"a",), "it must be a tuple of non-empty strings"),
    ("stop", None, "stop is None; it must be a tuple of non-empty strings"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_values_outside_the_limits(name: str, value: object, message: str) -> None:
    """The error names the field, its value and its limits."""
    with pytest.raises(InputError, match=message):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 1),
        ("temperature", 0),
        ("temperature", math.ulp(0.0)),
        ("top_p", 1),
        ("top_p", math.ulp(0.0)),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("seed", None),
        ("stop", ("a", "bc")),
    ],
)
def test_values_at_the_limits(name: str, value: object) -> None:
    """The limits themselves are legal, and kept as they are."""
    params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert getattr(params, name) == value


@given(sampling_params())
def test_legal_parameters_can_be_made_again(params: SamplingParams) -> None:
    """A copy with one change is checked and equal in the rest."""
    assert dataclasses.replace(params) == params


def test_defaults_are_greedy_and_change_no_logits() -> None:
    """Nothing is drawn and nothing is penalised unless asked for."""
    params = SamplingParams()
    assert params.is_greedy
    assert not params.has_penalties


def test_any_temperature_above_zero_draws() -> None:
    """Only 0 is greedy."""
    assert not SamplingParams(temperature=1e-9).is_greedy


@pytest.mark.parametrize(
    "changes",
    [{"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1}],
)
def test_each_penalty_is_noticed(changes: dict[str, float]) -> None:
    """One of them is enough to make tokens depend on those before."""
    assert SamplingParams(**changes).has_penalties  # type: ignore[arg-type]


def test_typical_defaults_are_the_published_ones() -> None:
    """Threshold 0.09 and alpha 0.3, not swapped."""
    params = TypicalParams()
    assert (params.posterior_threshold, params.posterior_alpha) == (0.09, 0.3)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_typical_threshold_is_a_probability(value: float) -> None:
    """The error names it."""
    with pytest.raises(InputError, match=f"posterior_threshold is {value}; it must be between"):
        TypicalParams(posterior_threshold=value)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_typical_alpha_is_not_negative(value: float) -> None:
    """The error names it."""
    with pytest.raises(InputError, match=f"posterior_alpha is {value}; it must be 0 or more"):
        TypicalParams(posterior_alpha=value)


def test_a_masked_token_has_no_part_in_the_entropy() -> None:
    """A row that masks tokens with -inf keeps a finite entropy: that of the others."""
    row = torch.tensor([1.0, 2.0, -math.inf, 0.5])
    masked, without = entropy_and_top1(row), entropy_and_top1(row[[0, 1, 3]])
    torch.testing.assert_close(torch.stack(masked), torch.stack(without))
