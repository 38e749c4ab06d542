"""Models with recurrent state, which no draft tree can be verified on.

Attention keeps a row for each token, so the rows of a rejected draft are dropped and all branches
are read at once. A linear-attention, state-space or convolution layer folds each token into one
state: it has no rows to drop, and siblings would overwrite one another.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from entmtp.errors import UnsupportedModelError

__all__ = ["refuse_recurrent"]

_TYPES = re.compile(
    "arwkv7|bailinghybrid|bamba|falconh1|falconmamba|glm5next|granitehybrid|granitemoehybrid|jamba|"
    "kimilinear|laramini|lfm[23](moe|vl)?|mamba2?|minimax(text01)?|nemotronh(moe)?|olmohybrid|"
    "plamo2|qwen35(moe)?|qwen3next|qwen4exp|recurrentgemma|rwkv[5-7]?|rwkv6qwen2|xlstm|zamba2?|zaya"
)
"""Model types of transformers and architectures of GGUF, without ``_``, ``-`` and ``_text``."""

_LAYERS = re.compile(
    "conv|gated_delta_net|hybrid|hybrid_sliding|linear_attention|mamba2?|recurrent|rwkv|ssm"
)


def refuse_recurrent(
    model_type: str, layer_types: Iterable[str], source: Path, supported: Iterable[str]
) -> None:
    """Refuse a model of which some layer keeps a recurrent state.

    Args:
        model_type: as the file states it.
        layer_types: one a layer, where the file states them.
        source: the file, for messages.
        supported: model types that are decoded.

    Raises:
        UnsupportedModelError: the model is such a one.
    """
    layer = next((kind for kind in layer_types if _LAYERS.fullmatch(kind)), None)
    name = model_type.lower().removesuffix("_text").replace("_", "").replace("-", "")
    if layer is None and not _TYPES.fullmatch(name):
        return
    what = f"model type {model_type!r}" if layer is None else f"a model with {layer!r} layers"
    raise UnsupportedModelError(
        f"{source}: {what} is not supported: its linear-attention, state-space or convolution "
        "layers keep a recurrent state, which cannot be rolled back to before a rejected draft, "
        "so a tree cannot be verified; supported are models of which every layer attends: "
        f"{', '.join(supported)}"
    )
