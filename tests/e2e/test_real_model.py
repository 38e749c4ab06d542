"""The promises on the real default model, where it has been pulled."""

from pathlib import Path

import pytest
import torch

import entmtp
from entmtp.loading.assets import MODELS, home, is_complete

NAME = "smollm2-135m"
PROMPT = "Name three rivers in Europe and say where each of them ends."
pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The pulled model."""
    path = home() / "models" / NAME
    if not is_complete(path, MODELS[NAME]):
        pytest.skip(f"{NAME} has not been pulled")
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> entmtp.GenerationResult:
    """What the model writes when nothing is drafted."""
    engine = entmtp.load(NAME, "none", dtype="float32", device="cpu")
    return engine.generate(
        engine.chat_prompt(PROMPT), entmtp.SamplingParams(max_new_tokens=32, seed=0)
    )


@pytest.mark.parametrize("drafter", ["lookup", "hydra", "medusa"])
def test_a_tree_changes_nothing(plain: entmtp.GenerationResult, drafter: str) -> None:
    """Greedy text through sixteen nodes a step is the model's own, token for token."""
    engine = entmtp.load(NAME, drafter, topology="tree16", dtype="float32", device="cpu")
    result = engine.generate(
        engine.chat_prompt(PROMPT), entmtp.SamplingParams(max_new_tokens=32, seed=0)
    )
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert result.stats.num_tokens == 32


def test_transformers_writes_the_same(folder: Path, plain: entmtp.GenerationResult) -> None:
    """The first 24 greedy tokens of the reference implementation, from the same weights."""
    from transformers import AutoModelForCausalLM

    engine = entmtp.load(NAME, "none", dtype="float32", device="cpu")
    prompt = torch.tensor([engine.chat_prompt(PROMPT)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
    )
    assert tuple(ids[0, prompt.shape[1] :].tolist()) == plain.token_ids[:24]
