"""A model without its blocks: sizes, embedding and output head, all that heads are held against."""

from functools import cached_property
from pathlib import Path

from torch import Tensor

from entmtp.target.base import TargetConfig
from entmtp.target.weights import iter_tensors, read_config

__all__ = ["ModelOutline"]

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class ModelOutline:
    """Reads two matrices of a model at most, and these only when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Read the sizes of a Hugging Face folder or a .gguf file.

        Raises:
            CheckpointError: missing or damaged.
            UnsupportedModelError: a model that cannot be decoded here.
        """
        self.config: TargetConfig = read_config(path)
        self._path = path

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding, as stored."""
        return self._tensors[_EMBEDDING]

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head, as stored."""
        return self._tensors[_EMBEDDING if self.config.tie_embeddings else _OUTPUT][ids]

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tensors = iter_tensors(self._path, self.config)
        return {name: value for name, value in tensors if name in (_EMBEDDING, _OUTPUT)}
