"""Weights of a target: a Hugging Face folder of safetensors, or a GGUF file.

Names are those of Hugging Face checkpoints. Everything is checked before the first tensor is
read: which names there are, and the shape of each.
"""

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entmtp.decoder.config import block_shapes
from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.base import TargetConfig
from entmtp.target.gguf_file import is_gguf, read_gguf
from entmtp.target.gguf_weights import gguf_config, gguf_shapes, gguf_tensors
from entmtp.target.hf_config import config_from_dict, config_to_dict
from entmtp.target.json_file import read_json

__all__ = ["is_extra_module", "iter_tensors", "read_config", "tensor_shapes", "write_model"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}
_EXTRA_MODULE = re.compile(r"model\.(layers|mtp_layers)\.([0-9]+)\.")
_LISTED = 3  # names a message lists before it only counts


def read_config(path: Path) -> TargetConfig:
    """Read the sizes of a model.

    Args:
        path: a Hugging Face folder (with config.json) or a .gguf file.

    Raises:
        CheckpointError: missing or damaged.
        UnsupportedModelError: a sound model that the reference target would decode wrongly.
    """
    if is_gguf(path):
        return gguf_config(read_gguf(path))
    source = path / "config.json"
    if not source.is_file():
        raise CheckpointError(
            f"{path} holds no config.json: give a Hugging Face model folder or a .gguf file"
        )
    return config_from_dict(read_json(source), source)


def iter_tensors(path: Path, config: TargetConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight once, as ``(name, tensor)``, holding no more than one at a time.

    Safetensors keep their stored dtype; GGUF tensors are dequantised to float32. The head of a
    tied model and native multi-token modules are not yielded.

    Args:
        path: a Hugging Face folder or a .gguf file.
        config: what :func:`read_config` returned for it.

    Raises:
        CheckpointError: at the call, for a missing, unexpected or wrongly shaped tensor or a
            damaged file; while iterating, where a file cannot be read.
    """
    if is_gguf(path):
        _check_shapes(gguf_shapes(read_gguf(path)), config, path)
        return gguf_tensors(path, config)
    files = _safetensors_files(path)
    where = _check_safetensors(files, config, path)
    return _read_safetensors(where)


def tensor_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a model of these sizes has."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in block_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes[_OUTPUT] = (config.vocab_size, hidden)
    return shapes


def is_extra_module(name: str, config: TargetConfig) -> bool:
    """Whether a tensor is of a native multi-token module, which lies beside the target's own.

    MiMo calls them ``model.mtp_layers.{i}``; DeepSeek and GLM count on after the last layer of the
    target. Only as many are known as the config states: one layer more is a model that was cut.
    """
    match = _EXTRA_MODULE.match(name)
    if match is None:
        return False
    first = config.num_layers if match[1] == "layers" else 0
    return first <= int(match[2]) < first + config.num_mtp_modules


def write_model(
    folder: Path,
    config: TargetConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors, which transformers and this module load.

    Tensors are written as they come, so memory holds one at a time. Each file appears whole or
    not at all.

    Args:
        folder: an existing folder.
        tensors: exactly those of :func:`tensor_shapes`, in any order.
        dtype: what they are stored as.
        extra: further keys of config.json, such as ``eos_token_id``.

    Raises:
        CheckpointError: tensors are missing, unexpected or wrongly shaped.
        OSError: the disk is full or not writable.
    """
    data = {**config_to_dict(config), "dtype": str(dtype).removeprefix("torch."), **(extra or {})}
    with _WholeFile(folder / _SINGLE) as path:
        _write_safetensors(path, tensor_shapes(config), tensors, dtype)
    with _WholeFile(folder / "config.json") as path:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _check_shapes(found: Mapping[str, tuple[int, ...]], config: TargetConfig, source: Path) -> None:
    """Hold names and shapes against the config."""
    expected = tensor_shapes(config)
    missing = expected.keys() - found.keys()
    if missing:
        raise CheckpointError(
            f"{source} lacks {_listing(missing)}, which its config asks for: fetch the model again"
        )
    unexpected = found.keys() - expected.keys()
    if unexpected:
        raise CheckpointError(
            f"{source} holds {_listing(unexpected)}, which a {config.family} model of its config "
            "does not have: check that config and weights belong together"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {found[name]}, but its config asks for "
                f"{shape}: check that config and weights belong together"
            )


def _safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those that the index names, or the single one."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map: fetch the model again")
        files = [folder / Path(str(name)).name for name in dict.fromkeys(weight_map.values())]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, but {_INDEX} names it: fetch it again")
        return files
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder} holds weights only as {pickles[0].name}, a pickle, which can run code when "
            "it is loaded and is refused: convert the model to safetensors"
        )
    raise CheckpointError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX}: give a folder with safetensors weights"
    )


def _check_safetensors(files: list[Path], config: TargetConfig, source: Path) -> dict[str, Path]:
    """Check the headers of all files; return where each expected tensor lies."""
    shapes: dict[str, tuple[int, ...]] = {}
    where: dict[str, Path] = {}
    for file in files:
        with _open_safetensors(file) as reader:
            names: list[str] = list(reader.keys())
            for name in names:
                if name.endswith(_BUFFERS) or is_extra_module(name, config):
                    continue
                view = reader.get_slice(name)
                if view.get_dtype() not in _DTYPES.values():
                    raise UnsupportedModelError(
                        f"{file}: tensor {name} is stored as {view.get_dtype()}, which is not "
                        f"supported; supported are {', '.join(_DTYPES.values())}"
                    )
                shapes[name] = tuple(view.get_shape())
                where[name] = file
    if config.tie_embeddings and _OUTPUT in where:
        _check_tie(where, source)
        del shapes[_OUTPUT], where[_OUTPUT]
    _check_shapes(shapes, config, files[0] if len(files) == 1 else source)
    return where


def _check_tie(where: Mapping[str, Path], source: Path) -> None:
    """A tied model may carry its head too, if it is the same matrix."""
    if _EMBEDDING not in where:
        return
    pair = dict(_read_safetensors({name: where[name] for name in (_EMBEDDING, _OUTPUT)}))
    embedding, output = pair[_EMBEDDING], pair[_OUTPUT]
    if embedding.dtype != output.dtype or not torch.equal(embedding, output):
        raise CheckpointError(
            f"{source}: {_OUTPUT} differs from {_EMBEDDING}, although config.json ties them: "
            'set "tie_word_embeddings": false there'
        )


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({error}): fetch it again"
        ) from error


def _read_safetensors(where: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors are views of a mapped file: one mapping each, and dropping one frees its pages."""
    for name, file in where.items():
        with _open_safetensors(file) as reader:
            tensor = reader.get_tensor(name)
        yield name, tensor


class _WholeFile:
    """A path to write to, moved to its place only when the block ends well."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._part = target.with_name(f".{target.name}.{os.getpid()}.part")

    def __enter__(self) -> Path:
        return self._part

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.replace(self._part, self._target)
        else:
            self._part.unlink(missing_ok=True)


def _write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Header first, from the shapes; then each tensor at its place."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        starts[name] = end
        end += dtype.itemsize * int(torch.Size(shape).numel())
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors:
            if shapes.get(name) != tuple(tensor.shape) or name not in starts:
                raise CheckpointError(
                    f"cannot write tensor {name} of shape {tuple(tensor.shape)}: the config asks "
                    f"for {shapes.get(name, 'no such tensor')}, once"
                )
            file.seek(8 + len(text) + starts.pop(name))
            file.write(tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy().data)
    if starts:
        raise CheckpointError(f"cannot write the model: {_listing(starts)} were not given")
