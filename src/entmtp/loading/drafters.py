"""From what a user calls a drafter to a drafter on a target."""

import logging
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from entmtp.drafters.base import Drafter
from entmtp.drafters.checkpoint import assemble_heads, heads_digest, load_heads
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.formats.base import ParsedHeads, TargetFacts
from entmtp.drafters.formats.layouts import detect
from entmtp.drafters.heads import Heads, HydraHeads, MedusaHeads, RecurrentModule
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.drafters.recurrent import RecurrentDrafter
from entmtp.drafters.tree_heads import HeadsDrafter
from entmtp.errors import AssetError, CheckpointError
from entmtp.linear import Projection
from entmtp.loading.assets import resolve_model
from entmtp.loading.heads_source import HeadsSource, find_heads, native_module
from entmtp.loading.native_heads import fits_core, make_native_drafter
from entmtp.target.base import Target, TargetConfig
from entmtp.target.native import NativeTarget

__all__ = [
    "HeadsBase",
    "heads_of_source",
    "load_drafter",
    "make_drafter",
    "make_torch_drafter",
    "shipped_heads",
    "source_of",
    "target_facts",
]

_SHIPPED_KINDS = ("hydra", "hydra++", "medusa")  # the fastest one first
_COMPARED_ROWS = 1024
_SAME_WEIGHTS, _SAME_MODEL = 1e-2, 0.5
"""Largest relative difference of two matrices that are the same up to their dtype; and of one
model's up to quantisation, where those of unrelated models differ by about 1.4."""

_log = logging.getLogger("entmtp")


class HeadsBase(Protocol):
    """What heads are held against: a target, or the outline of one."""

    @property
    def config(self) -> TargetConfig:
        """Sizes."""

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding."""

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head."""


def load_drafter(heads: str, target: Target, model: str) -> Drafter:
    """Make a drafter; arguments as in :func:`entmtp.load`.

    Raises:
        AssetError: a Hugging Face id could not be fetched.
        CheckpointError: the heads are missing, damaged or made for another model.
    """
    if heads == "none":
        return EmptyDrafter()
    if heads == "lookup":
        return PromptLookupDrafter()
    source = source_of(heads, model)
    if source is None:
        _log.warning("there are no heads for %s: drafting by prompt lookup", model)
        return PromptLookupDrafter()
    return make_drafter(heads_of_source(source, target, model), target)


def heads_of_source(source: HeadsSource, target: HeadsBase, model: str) -> Heads:
    """Read heads and hold them against the target; not yet attached to it.

    Args:
        source: where they lie.
        target: that they must fit.
        model: its name, for messages.

    Raises:
        CheckpointError: damaged, of an unknown layout, or made for another model.
    """
    facts = target_facts(target, model)
    if source.is_own_format:
        return load_heads(
            source.files[0],
            hidden_size=facts.block.hidden_size,
            vocab_size=facts.vocab_size,
            target=model,
        )
    found = detect(source.path, source.tensors(), source.config)
    parsed = found.parse(facts)
    _warn_of_another_base(found.checkpoint.base_model, model)
    if parsed.embedding is not None:
        _check_embedding(source.path, parsed.embedding, target, found.checkpoint.base_model, model)
    parsed = _with_own_output(parsed, target)
    return assemble_heads(parsed.config, parsed.hot_ids, parsed.tensors, source.path)


def make_drafter(heads: Heads, target: Target) -> Drafter:
    """Attach heads to a target; they are changed and belong to the drafter from then on."""
    if isinstance(target, NativeTarget) and fits_core(heads):
        digest = heads_digest(heads)
        return make_native_drafter(heads.to(target.device, target.dtype), target, digest)
    return make_torch_drafter(heads, target)


def make_torch_drafter(heads: Heads, target: Target) -> Drafter:
    """As :func:`make_drafter`, computed by torch; on a native target with its products."""
    digest = heads_digest(heads)
    heads = heads.to(target.device, target.dtype)
    if not heads.config.has_own_output:
        if heads.scores_all_tokens:
            heads.attach_projection(target.project_output)
        else:
            heads.attach_output(target.output_rows(heads.hot_ids))
    heads.pack(target.projection if isinstance(target, NativeTarget) else Projection)
    if isinstance(heads, RecurrentModule):
        return RecurrentDrafter(heads, target.embedding(), digest)
    assert isinstance(heads, MedusaHeads | HydraHeads)  # noqa: S101 - there is no other kind
    return HeadsDrafter(heads, target.embedding(), digest)


def target_facts(target: HeadsBase, model: str) -> TargetFacts:
    """What layouts of heads must know of a target."""
    return TargetFacts(model, target.config.vocab_size, target.config)


def shipped_heads() -> list[str]:
    """The heads in the package, as ``model/kind``."""
    files = sorted(_heads_folder().glob("*/*.safetensors"))
    return [f"{file.parent.name}/{file.stem}" for file in files]


def _shipped_source(model: str, kind: str) -> HeadsSource:
    file = _shipped_heads(model, kind)
    if file is None:
        raise CheckpointError(
            f"no {kind} heads are shipped for {model}; give a file of heads, train some with "
            "'entmtp train', or draft with 'lookup'"
        )
    return HeadsSource(file, (file,))


def source_of(heads: str, model: str) -> HeadsSource | None:
    """Where the heads lie that a user names; ``None`` where ``auto`` finds none.

    Args:
        heads: ``auto``, ``hydra++``, ``hydra``, ``medusa``, ``mtp``, a file, a folder or a Hugging
            Face id.
        model: whose shipped heads or multi-token module are meant.

    Raises:
        AssetError: a Hugging Face id could not be fetched.
        CheckpointError: there are no such heads.
    """
    if heads == "auto":
        file = next((f for kind in _SHIPPED_KINDS if (f := _shipped_heads(model, kind))), None)
        return _native_module(model) if file is None else HeadsSource(file, (file,))
    if heads in _SHIPPED_KINDS:
        return _shipped_source(model, heads)
    if heads == "mtp":
        source = _native_module(model)
        if source is None:
            raise CheckpointError(
                f"{model} has no multi-token module of its own (num_nextn_predict_layers in its "
                "config.json); give a file of heads, or draft with 'lookup'"
            )
        return source
    return find_heads(heads)


def _native_module(model: str) -> HeadsSource | None:
    try:
        path = resolve_model(model)
    except AssetError:  # an engine that was put together by hand may have a name of its own
        return None
    return native_module(path) if path.is_dir() else None


def _warn_of_another_base(base: str | None, model: str) -> None:
    """Names cannot prove anything, since a model may lie anywhere; so this is a warning."""
    if base is None or "/" not in model or Path(model).expanduser().exists():
        return
    if base.rpartition("/")[2].lower() != model.rpartition("/")[2].lower():
        _log.warning("the heads were made for %s, the model is %s", base, model)


def _check_embedding(
    path: Path, embedding: Tensor, target: HeadsBase, base: str | None, model: str
) -> None:
    """Hold the copy of the embedding that comes with some heads against the target's."""
    own = target.embedding()
    if embedding.shape != own.shape:
        raise CheckpointError(
            f"{path}: the heads carry an embedding of shape {tuple(embedding.shape)}, but that of "
            f"{model} has {tuple(own.shape)}: use heads made for this model"
        )
    rows = _sampled_rows(embedding)
    difference = _relative(embedding[rows], own[rows.to(own.device)])
    if not difference <= _SAME_MODEL:
        raise CheckpointError(
            f"{path}: the heads carry the embedding of {base or 'another model'}, which is not "
            f"that of {model} (relative difference {difference:.2f}): use heads made for this model"
        )


def _with_own_output(parsed: ParsedHeads, target: HeadsBase) -> ParsedHeads:
    """Keep an output matrix of the file only where it is not the target's."""
    if parsed.output is None:
        return parsed
    rows = _sampled_rows(parsed.output)
    if _relative(parsed.output[rows], target.output_rows(rows)) <= _SAME_WEIGHTS:
        return parsed
    config = replace(parsed.config, has_own_output=True, has_output_bias=False)
    return replace(
        parsed, config=config, tensors={**parsed.tensors, "outputs.0.weight": parsed.output}
    )


def _sampled_rows(matrix: Tensor) -> Tensor:
    """Indices of rows spread over a matrix."""
    return torch.arange(0, len(matrix), max(1, len(matrix) // _COMPARED_ROWS))


def _relative(given: Tensor, own: Tensor) -> float:
    a, b = given.float().cpu(), own.float().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def _shipped_heads(model: str, kind: str) -> Path | None:
    path = _heads_folder() / model / f"{kind}.safetensors"
    return path if f"{model}/{kind}" in shipped_heads() else None


def _heads_folder() -> Path:
    return Path(str(resources.files("entmtp").joinpath("data/heads")))
