"""Perplexity, divergence and intervals: the arithmetic, on numbers made by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from entmtp.errors import InputError, NumericalError
from entmtp.quality import (
    CHUNK,
    Sums,
    TargetScorer,
    Text,
    estimate,
    limit_texts,
    measure,
    parse_backends,
    read_texts,
    row_measures,
    text_digest,
)
from fakes import ByteTokenizer, tiny_target


class Shifted:
    """A scorer whose logits are those of another one, changed."""

    def __init__(self, scorer: TargetScorer, scale: float = 1.0) -> None:
        self._scorer, self._scale = scorer, scale
        self.most_rows = 0

    def start(self) -> None:
        self._scorer.start()

    def read(self, tokens: Sequence[int]) -> None:
        self._scorer.read(tokens)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        self.most_rows = max(self.most_rows, len(tokens))
        return self._scorer.logits(tokens) * self._scale


def random_sums(num_texts: int, seed: int = 0) -> Sums:
    """Three backends, the second a copy of the first, over texts of 5 to 50 tokens."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(5, 50, num_texts).astype(float)
    nll = counts * rng.normal(3.0, 0.5, num_texts)
    worse = nll + counts * rng.normal(0.02, 0.05, num_texts)
    kl, same = counts * rng.gamma(2.0, 0.01, num_texts), counts * rng.uniform(0.9, 1, num_texts)
    zero = np.zeros(num_texts)
    return Sums(
        counts,
        np.stack([nll, nll, worse]),
        np.stack([zero, zero, kl]),
        np.stack([counts, counts, same]),
    )


def test_measures_of_a_row_are_those_of_the_textbook() -> None:
    """Sums over the vocabulary, written out."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.35, 0.4])
    reference, logits = (
        torch.tensor(np.log(np.stack([p, q]))),
        torch.tensor(np.log(np.stack([q, q]))),
    )
    nll, kl, same = row_measures(reference + 5, logits - 3, torch.tensor([2, 0]))
    assert nll.tolist() == pytest.approx([-math.log(0.4), -math.log(0.25)], abs=1e-6)
    assert kl.tolist() == pytest.approx([float((p * np.log(p / q)).sum()), 0.0], abs=1e-6)
    assert same.tolist() == [0.0, 1.0]


def test_perplexity_is_that_of_all_tokens() -> None:
    """Tokens weigh alike, whatever text they are of."""
    sums = Sums(
        np.array([1.0, 3.0]),
        np.array([[1.0, 6.0], [2.0, 6.0]]),
        np.array([[0.0, 0.0], [0.4, 0.4]]),
        np.array([[1.0, 3.0], [0.0, 2.0]]),
    )
    base, other = estimate(sums)
    assert base.perplexity.value == pytest.approx(math.exp(7 / 4))
    assert other.difference.value == pytest.approx(math.exp(8 / 4) / math.exp(7 / 4) - 1)
    assert (other.kl.value, other.agreement.value) == pytest.approx((0.2, 0.5))


def test_a_copy_of_float32_differs_by_nothing() -> None:
    """The draws are paired, so the interval of the difference has no width."""
    copy = estimate(random_sums(30))[1]
    assert (copy.difference.value, copy.difference.low, copy.difference.high) == (0.0, 0.0, 0.0)
    assert copy.perplexity.low < copy.perplexity.value < copy.perplexity.high


def test_intervals_are_those_of_the_normal_approximation_for_many_texts() -> None:
    """Bootstrap and the error of a ratio of sums agree; the same call gives the same numbers."""
    sums = random_sums(400)
    found = estimate(sums)[2]
    assert found == estimate(sums)[2]
    mean = sums.kl[2].sum() / sums.counts.sum()
    residuals = sums.kl[2] - mean * sums.counts
    error = math.sqrt(float((residuals**2).sum())) / sums.counts.sum()
    assert found.kl.low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert found.kl.high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)
    assert found.difference.high - found.difference.low < (
        (found.perplexity.high - found.perplexity.low) / found.perplexity.value / 3
    )


def test_one_text_has_no_interval() -> None:
    """There is nothing to draw from."""
    found = estimate(random_sums(1))[2]
    assert (found.kl.low, found.kl.high) == (None, None)


def test_chunks_add_up_to_the_whole_text() -> None:
    """Prompts are read and not counted; no more than a chunk of rows is in memory."""
    tokens = tuple((11 * i) % 250 for i in range(3 * CHUNK + 7))
    texts = [Text(tokens, 1), Text(tokens[:90], 70), Text(tokens[:2], 1)]
    target = tiny_target()
    scorers = {
        "float32": Shifted(TargetScorer(target, 256)),
        "x": Shifted(TargetScorer(target, 256), 0.9),
    }
    sums = measure(scorers, texts)
    logits = TargetScorer(target, 256).logits(tokens)
    for column, text in enumerate(texts):
        rows = slice(text.first - 1, len(text.tokens) - 1)
        following = torch.tensor(tokens[text.first : len(text.tokens)])
        nll, kl, same = row_measures(logits[rows], 0.9 * logits[rows], following)
        assert sums.counts[column] == len(following)
        assert sums.nll[1, column] == pytest.approx(float(nll.sum()), rel=1e-5)
        assert sums.kl[1, column] == pytest.approx(float(kl.sum()), rel=1e-4)
        assert sums.same[1, column] == float(same.sum())
    assert max(scorer.most_rows for scorer in scorers.values()) == CHUNK


def test_logits_that_are_not_finite_end_the_run() -> None:
    """The message names the backend."""
    target = tiny_target()
    scorers = {
        "float32": TargetScorer(target, 8),
        "bad": Shifted(TargetScorer(target, 8), math.nan),
    }
    with pytest.raises(NumericalError, match="bad gives logits"):
        measure(scorers, [Text((1, 2, 3), 1)])


def test_plain_text_is_cut_into_windows(tmp_path: Path) -> None:
    """All bytes but the first of each window are counted; a window of one token is none."""
    file = tmp_path / "a.txt"
    file.write_text("abcdefghi")
    texts = read_texts(file, ByteTokenizer(), 4)
    assert [bytes(text.tokens).decode() for text in texts] == ["abcd", "efgh"]
    assert [text.num_counted for text in texts] == [3, 3]


def test_of_prompts_only_the_reference_is_counted(tmp_path: Path) -> None:
    """Under the chat template, cut at the window; records without one are passed over."""
    file, tokenizer = tmp_path / "a.jsonl", ByteTokenizer()
    rows = [
        {"prompt": "hi", "reference": "hello"},
        {"prompt": "no"},
        {"prompt": "x" * 99, "reference": "y"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    (text,) = read_texts(file, tokenizer, len(prompt) + 4)
    assert text.tokens == (*prompt, *tokenizer.encode("hell"))
    assert text.num_counted == 4


class StartTokenizer(ByteTokenizer):
    """Puts a token in front of every text."""

    def encode(self, text: str) -> list[int]:
        return [256, *super().encode(text)]


def test_every_window_begins_as_a_text_begins(tmp_path: Path) -> None:
    """The token that a tokenizer puts first is read in each window and never counted."""
    file = tmp_path / "a.txt"
    file.write_text("abcde")
    texts = read_texts(file, StartTokenizer(), 4)
    assert [text.tokens for text in texts] == [(256, 97, 98, 99), (256, 100, 101)]
    assert [text.num_counted for text in texts] == [3, 2]


def test_a_limit_cuts_the_last_text() -> None:
    """Exactly so many positions are left."""
    texts = [Text((1, 2, 3, 4), 1), Text((1, 2, 3, 4), 2), Text((1, 2), 1)]
    kept = limit_texts(texts, 4)
    assert kept == [Text((1, 2, 3, 4), 1), Text((1, 2, 3), 2)]
    assert limit_texts(texts, None) == texts
    assert text_digest(kept) != text_digest(texts)


def test_float32_comes_first() -> None:
    """It is what the others are held against."""
    assert parse_backends("int8, llamacpp:Q8_0,int8") == ("float32", "int8", "llamacpp:Q8_0")
    with pytest.raises(InputError, match="backend is 'int4'"):
        parse_backends("float32,int4")
