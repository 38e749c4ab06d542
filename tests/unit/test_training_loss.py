"""The loss of training: over a sample of tokens, with noise, and from where modules begin."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.heads import Heads, HeadsConfig, HydraHeads, build_heads
from entmtp.errors import TrainingError
from entmtp.train import output_sample
from entmtp.train.batches import Batch, step_generator
from entmtp.train.losses import FeatureReader, with_noise
from entmtp.train.output_sample import OutputSample
from entmtp.train.sequences import SequenceRows
from entmtp.train.start import start_as_identity, start_from

HIDDEN, HOT, EXACT = 8, 60, 12
BLOCK = BlockConfig(
    hidden_size=HIDDEN, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4
)


@pytest.fixture(autouse=True)
def few_exact_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a small vocabulary is rare."""
    monkeypatch.setattr(output_sample, "NUM_EXACT", EXACT)


def make_rows(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output matrix, order of tokens, features, and targets of all sorts."""
    draw = torch.Generator().manual_seed(seed)
    output = torch.randn(HOT, HIDDEN, generator=draw)
    order = torch.randperm(HOT, generator=draw)
    features = torch.randn(num_rows, HIDDEN, generator=draw, requires_grad=True)
    return output, order, features, torch.arange(num_rows) % HOT


@pytest.mark.parametrize("num_sampled", [0, HOT - EXACT, 1000])
def test_a_sample_of_everything_is_the_whole_loss(num_sampled: int) -> None:
    """Both losses are torch's own over the hot vocabulary."""
    output, order, features, targets = make_rows(70)
    sample = OutputSample(output, order, num_sampled, step_generator(0, 0))
    scores = features @ output.T
    expected = functional.cross_entropy(scores, targets)
    assert torch.equal(sample.cross_entropy(features, targets), expected)
    teacher = torch.log_softmax(features.detach().flip(0) @ output.T, dim=1)
    divergence = functional.kl_div(
        scores.log_softmax(dim=1), teacher, reduction="batchmean", log_target=True
    )
    assert torch.allclose(sample.divergence(features, features.flip(0)), divergence)


@pytest.mark.parametrize("seed", range(3))
def test_the_cross_entropy_of_a_sample_is_what_its_formula_says(seed: int) -> None:
    """Drawn tokens stand for their share of the rare ones, the target for itself alone."""
    output, order, features, targets = make_rows(70, seed)
    num_sampled = 7
    sample = OutputSample(output, order, num_sampled, step_generator(seed, 4))
    rare = order[EXACT:]
    draw = torch.randperm(len(rare), generator=step_generator(seed, 4))
    drawn = set(rare[draw[:num_sampled]].tolist())
    scores = (features @ output.T).double().tolist()
    losses = []
    for row, target in enumerate(targets.tolist()):
        weights = {int(token): 1.0 for token in order[:EXACT]}
        weights |= dict.fromkeys(drawn, len(rare) / num_sampled)
        weights[target] = 1.0
        total = sum(weight * math.exp(scores[row][token]) for token, weight in weights.items())
        losses.append(math.log(total) - scores[row][target])
    loss = sample.cross_entropy(features, targets)
    assert float(loss.detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert bool(torch.isfinite(features.grad).all())


def test_samples_agree_with_the_whole_on_average() -> None:
    """Over many draws the sums of exponentials are those of all tokens."""
    output, order, features, _ = make_rows(5)
    features = features.detach()
    whole = torch.logsumexp(features @ output.T, dim=1)
    frequent = order[:1].expand(len(features))
    sums = torch.zeros(len(features))
    for step in range(2000):
        sample = OutputSample(output, order, 6, step_generator(1, step))
        for row in range(len(features)):
            loss = sample.cross_entropy(features[row : row + 1], frequent[row : row + 1])
            sums[row] += torch.exp(loss + features[row] @ output[frequent[row]])
    assert torch.allclose(sums / 2000, whole.exp(), rtol=0.05)


def test_a_head_that_scores_as_the_target_diverges_by_nothing() -> None:
    """Over a sample too, and the draw of another step is another one."""
    output, order, features, _ = make_rows(9)
    samples = [OutputSample(output, order, 7, step_generator(0, step)) for step in range(2)]
    for sample in samples:
        assert float(sample.divergence(features, features).detach()) == pytest.approx(0, abs=1e-6)
    other = features.detach().flip(0)
    first, second = (float(sample.divergence(features, other).detach()) for sample in samples)
    assert first > 0
    assert first != second


def make_batch() -> Batch:
    """Two sequences of states, with the tokens behind them."""
    draw = torch.Generator().manual_seed(3)
    hidden = 3 * torch.randn(9, HIDDEN, generator=draw)
    index = torch.tensor([1, 2, 6, 7])
    text = SequenceRows(hidden, torch.arange(9), (4, 5), index)
    return Batch(hidden[index], torch.arange(8).view(4, 2), torch.zeros(4, 2).long(), None, text)


def test_noise_has_the_asked_size_and_is_the_same_wherever_a_state_is_read() -> None:
    """Of the text's rows and of the examples that stand in it."""
    batch = make_batch()
    noisy = with_noise(batch, 0.1, step_generator(0, 5))
    assert batch.text is not None
    assert noisy.text is not None
    assert torch.equal(noisy.hidden, noisy.text.hidden[batch.text.index])
    size = float(batch.text.hidden.square().mean().sqrt())
    change = (noisy.text.hidden - batch.text.hidden) / size
    assert 0.05 < float(change.std()) < 0.2
    again = with_noise(batch, 0.1, step_generator(0, 5))
    assert torch.equal(again.hidden, noisy.hidden)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "mtp"])
@pytest.mark.parametrize("hidden_first", [False, True])
def test_every_new_module_passes_the_state_on(kind: str, hidden_first: bool) -> None:
    """In direction, and in size on the whole, whatever tokens stand above."""
    block = BLOCK if kind in ("hydra++", "mtp") else None
    config = HeadsConfig(kind, HIDDEN, 30, 2, num_layers=2, hidden_first=hidden_first, block=block)
    heads = build_heads(config, torch.arange(30))
    batch = make_batch()
    assert batch.text is not None
    start_as_identity(heads, batch.text.hidden)
    made = list(FeatureReader(heads, torch.randn(30, HIDDEN), 2).read(batch))
    for features in made:
        closeness = functional.cosine_similarity(features, batch.hidden)
        assert torch.allclose(closeness, torch.ones(4), atol=1e-5)
        ratio = features.square().mean().sqrt() / batch.text.hidden.square().mean().sqrt()
        assert 0.7 < float(ratio.detach()) < 1.4
    if isinstance(heads, HydraHeads) and heads.prefix is None:
        assert torch.equal(made[0], batch.hidden)


def random_heads(kind: str, seed: int = 0, **sizes: Any) -> Heads:
    """As if they had been trained."""
    block = BLOCK if kind in ("hydra++", "mtp") else None
    heads = build_heads(HeadsConfig(kind, HIDDEN, 30, 2, block=block, **sizes), torch.arange(30))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=draw)
    return heads


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "mtp"])
def test_a_run_can_begin_with_trained_heads(kind: str) -> None:
    """All their weights are taken over."""
    heads, trained = random_heads(kind, 1), random_heads(kind, 2)
    start_from(heads, trained)
    given = trained.state_dict()
    assert all(torch.equal(value, given[name]) for name, value in heads.state_dict().items())


def test_hydra_heads_become_the_heads_of_a_prefix_layer() -> None:
    """The prefix layer stays what it was."""
    heads, trained = random_heads("hydra++", 1), random_heads("hydra", 2)
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    start_from(heads, trained)
    given = trained.state_dict()
    for name, value in heads.state_dict().items():
        assert torch.equal(value, before[name] if name.startswith("prefix.") else given[name])


def test_other_heads_are_no_start() -> None:
    """Another kind, other sizes, another scale; the message says what differs and what to do."""
    heads = random_heads("hydra")
    with pytest.raises(TrainingError, match=r"of kind medusa are no start for hydra; .*hydra\+\+"):
        start_from(heads, random_heads("medusa"))
    with pytest.raises(TrainingError, match=r"no start for hydra"):
        start_from(heads, random_heads("hydra++"))
    with pytest.raises(TrainingError, match=r"other sizes .*blocks.* leave out the options"):
        start_from(heads, random_heads("hydra", num_layers=3))
    with pytest.raises(TrainingError, match="embed_scale of 3, not 1"):
        start_from(heads, random_heads("hydra", embed_scale=3.0))
