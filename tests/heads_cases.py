"""Every published layout of heads and its variants, by name, around one tiny model."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from entmtp.drafters.base import Drafter, DraftRequest
from entmtp.drafters.formats.layouts import detect
from entmtp.errors import CheckpointError
from entmtp.loading.drafters import load_drafter, target_facts
from entmtp.loading.heads_source import find_heads
from entmtp.loading.loader import load_target
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import iter_tensors, read_config
from entmtp.topology import Topology
from published import (
    Published,
    Sizes,
    TargetArrays,
    add_to_model,
    draft_tokens,
    hydra_mlp,
    hydra_prefix_mlp,
    medusa_v1,
    medusa_v2,
    mtp_deepseek,
    mtp_mimo,
    vllm_medusa,
)
from tiny_model import make_model_folder

__all__ = [
    "CASES",
    "LAYOUTS",
    "MODEL",
    "SIZES",
    "Case",
    "Text",
    "World",
    "brute_force",
    "needed",
    "random_text",
    "refusal",
    "rewritten",
    "tensors_of",
    "verdict",
]

MODEL = "tiny-model"
SIZES = Sizes()

_OPTIONAL = re.compile(
    r".*(inv_freq|embed_tokens\.weight|input_embed_fn\.weight|shared_head\.head\.weight)"
)

Build = Callable[["World", Path], Published]


class World:
    """A tiny model on disk, and what the formulas of heads use of it."""

    def __init__(self, folder: Path, **changes: int) -> None:
        """Write the model, of other sizes if wanted; read it in float64: no near-tie can flip."""
        self.folder = make_model_folder(folder, tie_embeddings=False, **changes)
        config = read_config(self.folder)
        self.target = LlamaTarget(config, iter_tensors(self.folder, config), torch.float64)
        plain = load_target(self.folder, dtype="float32", device="cpu")
        self.arrays = TargetArrays(
            plain.embedding().double().numpy(),
            plain.output_rows(torch.arange(SIZES.vocab_size)).double().numpy(),
        )

    def drafter(self, heads: Path) -> Drafter:
        """Heads from a file or folder on the model."""
        return load_drafter(str(heads), self.target, MODEL)

    def with_module(self, folder: Path, kind: str, **options: bool) -> Published:
        """A copy of the model with a native multi-token module, ``deepseek`` or ``mimo``."""
        if kind == "deepseek":
            layer = self.target.config.num_layers
            tensors, scores = mtp_deepseek(SIZES, layer, target=self.arrays, **options)
        else:
            tensors, scores = mtp_mimo(SIZES, **options)
        make_model_folder(folder, tie_embeddings=False)
        file = add_to_model(folder, tensors, num_nextn_predict_layers=1)
        return Published(folder, file, None, scores)


@dataclass(frozen=True)
class Case:
    """A layout or a variant of one, and what its tensors say."""

    build: Build
    kind: str
    layout: str
    num_heads: int = 3
    num_layers: int = 1
    hot_vocab_size: int = SIZES.vocab_size


@dataclass(frozen=True)
class Text:
    """A sequence that a drafter has followed: hidden states ``(T, H)`` and T + 1 tokens."""

    state: object
    hidden: Tensor
    tokens: tuple[int, ...]

    def request(self, plan: Topology) -> DraftRequest:
        """Ask for a tree behind the text."""
        return DraftRequest(self.state, self.tokens[-1], plan)


def random_text(drafter: Drafter, seed: int, *, draft_between: bool = True) -> Text:
    """A text read by a prefill and commits of several rows, with trees drafted in between."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [rng.randint(1, 8), *(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))]
    length = sum(sizes)
    hidden = torch.randn(length, SIZES.hidden_size, generator=generator, dtype=torch.float64)
    tokens = tuple(rng.randrange(SIZES.vocab_size) for _ in range(length + 1))
    done = sizes[0]
    state = drafter.prefill(tokens[:done], hidden[:done], tokens[done])
    for size in sizes[1:]:
        if draft_between and rng.random() < 0.5:
            drafter.draft([DraftRequest(state, tokens[done], Topology.from_paths([(0,), (0, 1)]))])
        drafter.commit(state, hidden[done : done + size], tokens[done + 1 : done + size + 1])
        done += size
    return Text(state, hidden, tokens)


def brute_force(world: World, published: Published, text: Text, plan: Topology) -> list[int]:
    """Tokens of a tree, root included, by the published formulas."""
    hidden: Sequence[Sequence[float]] = text.hidden.numpy()
    drafted = draft_tokens(published, world.arrays, hidden, text.tokens, plan.paths)
    return [text.tokens[-1], *drafted]


def tensors_of(published: Published) -> dict[str, Tensor]:
    """The tensors of the heads by their published names, each a copy."""
    source = find_heads(str(published.folder))
    return {name: tensor.clone() for name, tensor in source.tensors().items()}


def needed(published: Published) -> dict[str, Tensor]:
    """The tensors without which the heads cannot be used."""
    return {n: t for n, t in tensors_of(published).items() if not _OPTIONAL.fullmatch(n)}


def rewritten(
    published: Published,
    folder: Path,
    tensors: Mapping[str, object],
    config: Mapping[str, object] | None = None,
) -> Path:
    """A folder with other tensors in the place of the published ones; the file in it.

    ``config`` holds entries of config.json to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = json.loads((published.folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(entries))
    file = folder / published.file.name
    if file.suffix == ".safetensors":
        save_file({n: t.contiguous() for n, t in tensors.items()}, file)  # type: ignore[attr-defined]
    else:
        torch.save(dict(tensors), file)
    return file


def refusal(world: World, path: Path, error: type[CheckpointError] = CheckpointError) -> str:
    """The message of a refusal: one line, and no path of this machine but the given one."""
    with pytest.raises(error) as caught:
        world.drafter(path)
    text = str(caught.value)
    root = path if path.is_dir() else path.parent
    assert "\n" not in text
    assert not re.search(r"Traceback|torch\.load|weights_only=", text)
    assert not re.search(r"(?<![\w.])/\w", text.replace(str(root), "HERE"))
    return text


def verdict(
    world: World, tensors: Mapping[str, Tensor], error: type[CheckpointError] = CheckpointError
) -> str:
    """The message for tensors that are in memory already, as of a file ``heads.pt``."""
    with pytest.raises(error) as caught:
        detect(Path("heads.pt"), tensors, {}).parse(target_facts(world.target, MODEL))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("heads.pt")
    return text


def _alone(make: Callable[..., Published], **options: object) -> Build:
    return lambda world, folder: make(folder, SIZES, **options)


def _on_target(make: Callable[..., Published], **options: object) -> Build:
    return lambda world, folder: make(folder, SIZES, world.arrays, **options)


def _module(kind: str, **options: bool) -> Build:
    return lambda world, folder: world.with_module(folder, kind, **options)


def _vllm_cases() -> dict[str, Case]:
    """Rows x output head x bias, some under a prefix and with two layers."""
    cases = {}
    for number, (rows, shared, bias) in enumerate(
        (rows, shared, bias)
        for rows in ("full", "truncated", "mapped")
        for shared in (False, True)
        for bias in (False, True)
    ):
        name = f"vllm-{rows}{'-shared' * shared}{'-bias' * bias}"
        build = partial(vllm_medusa, seed=number, rows=rows, shared=shared, bias=bias)
        prefix = "medusa_heads." if number % 3 == 0 else ""
        layers = 1 + number % 2
        hot = SIZES.vocab_size if rows == "full" else SIZES.vocab_size // 3
        cases[name] = Case(
            _alone(build, prefix=prefix, num_layers=layers), "medusa", "medusa-vllm", 3, layers, hot
        )
    return cases


CASES: dict[str, Case] = {
    "medusa-v1": Case(_alone(medusa_v1), "medusa", "medusa-v1", 5),
    "medusa-v1-tied": Case(_alone(medusa_v1, num_layers=2), "medusa", "medusa-v1", 5, 2),
    "medusa-v2": Case(_alone(medusa_v2), "medusa", "medusa-v2"),
    "medusa-v2-tied": Case(_alone(medusa_v2, num_layers=3), "medusa", "medusa-v2", 3, 3),
    **_vllm_cases(),
    "hydra": Case(_on_target(hydra_mlp), "hydra", "hydra-mlp", 4),
    "hydra-tied": Case(_on_target(hydra_mlp, num_layers=3), "hydra", "hydra-mlp", 4, 3),
    "hydra++": Case(_on_target(hydra_prefix_mlp), "hydra++", "hydra-prefix-mlp", 4, 4),
    "hydra++-one": Case(
        _on_target(hydra_prefix_mlp, num_layers=1), "hydra++", "hydra-prefix-mlp", 4, 1
    ),
    "mtp-deepseek": Case(_module("deepseek"), "mtp", "mtp-deepseek", 1),
    "mtp-deepseek-copies": Case(_module("deepseek", with_copies=True), "mtp", "mtp-deepseek", 1),
    "mtp-mimo": Case(_module("mimo"), "mtp", "mtp-mimo", 1),
    "mtp-mimo-bias-free": Case(_module("mimo", qkv_bias=False), "mtp", "mtp-mimo", 1),
}
"""By name; the multi-token modules lie in a copy of the model."""

LAYOUTS = (
    "medusa-v1",
    "medusa-v2",
    "vllm-truncated-bias",
    "hydra",
    "hydra++",
    "mtp-deepseek-copies",
    "mtp-mimo",
)
"""One case of each layout."""
