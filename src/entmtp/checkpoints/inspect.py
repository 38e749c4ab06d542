"""What a file of heads is and what it needs, from its tensors alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from entmtp.drafters.checkpoint import read_heads_file
from entmtp.drafters.formats.base import HeadsSizes
from entmtp.drafters.formats.layouts import detect
from entmtp.loading.heads_source import HeadsSource

__all__ = ["HeadsSummary", "inspect_heads"]


@dataclass(frozen=True)
class HeadsSummary:
    """For people and for JSON.

    Attributes:
        path: of the file or folder.
        layout: ``medusa-v1``, ``medusa-v2``, ``medusa-vllm``, ``hydra-mlp``, ``hydra-prefix-mlp``,
            ``mtp-deepseek``, ``mtp-mimo`` or ``entmtp``.
        kind: of the drafter.
        num_heads: counted from the tensors; 1 for a recurrent module.
        num_layers: blocks a head.
        hidden_size: H.
        vocab_size: V; ``None`` where the file does not tell.
        hot_vocab_size: tokens that are scored; ``None`` is all.
        output: whose matrix scores the tokens.
        base_model: that the file or its config names.
        parameters: numbers stored.
        size_bytes: of all tensors.
        dtypes: that they are stored in.
        needs: what a model must have, and how deep a tree may be.
        notes: what else a user should know.
    """

    path: str
    layout: str
    kind: str
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    hot_vocab_size: int | None
    output: str
    base_model: str | None
    parameters: int
    size_bytes: int
    dtypes: tuple[str, ...]
    needs: str
    notes: tuple[str, ...]


def inspect_heads(source: HeadsSource) -> HeadsSummary:
    """Describe heads.

    Raises:
        CheckpointError: damaged, or of no known layout.
    """
    tensors = source.tensors()
    if source.is_own_format:
        about = read_heads_file(source.files[0])
        config = about.config
        sizes = HeadsSizes(
            layout="entmtp",
            kind=config.kind,
            num_heads=config.num_heads,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            hot_vocab_size=about.hot_vocab_size,
            output="own matrices" if config.has_own_output else "the target's output head",
        )
        return _summary(source, sizes, about.target, tensors.values())
    found = detect(source.path, tensors, source.config)
    return _summary(source, found.sizes(), found.checkpoint.base_model, tensors.values())


def _summary(
    source: HeadsSource, sizes: HeadsSizes, base_model: str | None, tensors: Iterable[Tensor]
) -> HeadsSummary:
    stored = list(tensors)
    hot = sizes.hot_vocab_size
    return HeadsSummary(
        path=str(source.path),
        layout=sizes.layout,
        kind=sizes.kind,
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        hot_vocab_size=None if hot == sizes.vocab_size else hot,
        output=sizes.output,
        base_model=base_model,
        parameters=sum(t.numel() for t in stored),
        size_bytes=sum(t.numel() * t.element_size() for t in stored),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in stored})),
        needs=_needs(sizes, base_model),
        notes=sizes.notes,
    )


def _needs(sizes: HeadsSizes, base_model: str | None) -> str:
    model = f"a model with hidden size {sizes.hidden_size}"
    if sizes.vocab_size is not None:
        model += f" and a vocabulary of {sizes.vocab_size}"
    if base_model is not None:
        model += f" ({base_model})"
    is_recurrent = sizes.kind == "mtp"
    trees = "trees of any depth" if is_recurrent else f"trees of depth <= {sizes.num_heads}"
    return f"{model}; {trees}"
