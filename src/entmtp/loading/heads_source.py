"""Where heads lie: a file, a folder, a Hugging Face id, or inside the model's own checkpoint."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from entmtp.drafters.checkpoint import FORMAT
from entmtp.drafters.formats.base import listing
from entmtp.drafters.formats.tensor_file import SUFFIXES, holds_any, read_metadata, read_tensors
from entmtp.errors import CheckpointError
from entmtp.loading.assets import HUB_ID, from_hub, user_path
from entmtp.target.json_file import read_json

__all__ = ["HeadsSource", "find_heads", "named_base_model", "native_module"]

_HUB_FILES = ("*.safetensors", "*.pt", "config.json")
_USUAL_NAMES = ("medusa_lm_head", "hydra_lm_head")
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class HeadsSource:
    """Where a set of heads lies.

    Attributes:
        path: the file, or the model's folder; for messages.
        files: that hold the tensors.
        config: ``config.json`` beside them; empty where there is none.
        only: names of the tensors that belong to the heads; all without.
    """

    path: Path
    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    only: re.Pattern[str] | None = None

    @property
    def is_own_format(self) -> bool:
        """True for a file that this project wrote."""
        return len(self.files) == 1 and read_metadata(self.files[0]).get("format") == FORMAT

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the heads by name.

        Raises:
            CheckpointError: a file is damaged.
        """
        return {n: t for file in self.files for n, t in read_tensors(file, self.only).items()}


def find_heads(name: str, *, download: Callable[[str], str] | None = None) -> HeadsSource:
    """Find heads by what a user gives.

    Args:
        name: a file, a folder with heads (or a model with modules of its own), or a Hugging Face
            id.
        download: fetches an id and returns its folder; by default through huggingface_hub.

    Raises:
        AssetError: it could not be fetched.
        CheckpointError: it is nowhere, or a folder without heads.
    """
    path = user_path(name)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):
        is_file = is_folder = False
    if is_file:
        if path.suffix not in SUFFIXES:
            raise CheckpointError(
                f"{path} is no file of heads by its name; heads end in {', '.join(SUFFIXES)}"
            )
        return HeadsSource(path, (path,), _config(path.parent))
    if is_folder:
        return _in_folder(path)
    if HUB_ID.fullmatch(name) and not name.startswith(".") and path.suffix not in SUFFIXES:
        return _in_folder(Path(from_hub(name, download or _snapshot)))
    raise CheckpointError(
        f"{name}: no such file or folder of heads: give hydra++, hydra, medusa, mtp, lookup or "
        "none, a file, a folder or a Hugging Face id"
    )


def native_module(folder: Path) -> HeadsSource | None:
    """The multi-token modules inside a model's own checkpoint, if it has any.

    Some copies of a model leave them out and still state them, so the files have the last word.

    Raises:
        CheckpointError: config.json or a file of weights is damaged.
    """
    config = _config(folder)
    num_modules, num_layers = (
        config.get("num_nextn_predict_layers"),
        config.get("num_hidden_layers"),
    )
    if not isinstance(num_modules, int) or not isinstance(num_layers, int) or num_modules < 1:
        return None
    layers = "|".join(str(num_layers + i) for i in range(min(num_modules, 64)))
    only = re.compile(rf"model\.(mtp_layers\.\d+|layers\.({layers}))\..*")
    files = tuple(file for file in sorted(folder.glob("*.safetensors")) if holds_any(file, only))
    return HeadsSource(folder, files, config, only) if files else None


def named_base_model(path: Path) -> str | None:
    """The model that a folder of heads names as its base; ``None`` for any other folder.

    Raises:
        CheckpointError: config.json is damaged.
    """
    if not path.is_dir() or any((path / name).exists() for name in _WEIGHT_FILES[1:]):
        return None
    config = _config(path)
    base = config.get("base_model_name_or_path")
    is_model = "model_type" in config and config["model_type"] != "medusa"
    return base if isinstance(base, str) and base and not is_model else None


def _in_folder(folder: Path) -> HeadsSource:
    config = _config(folder)
    found = {p.name: p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and p.is_file()}
    usual = [f"{stem}{suffix}" for stem in _USUAL_NAMES for suffix in SUFFIXES]
    for name in usual:
        if name in found:
            return HeadsSource(found[name], (found[name],), config)
    native = native_module(folder)
    if native is not None:
        return native
    if len(found) == 1:
        (file,) = found.values()
        return HeadsSource(file, (file,), config)
    if found:
        raise CheckpointError(
            f"{folder} holds several files that could be heads ({listing(found)}): name the file"
        )
    raise CheckpointError(
        f"{folder} holds no file of heads: give a file, or a folder with {usual[0]}, {usual[1]} or "
        "hydra_lm_head.pt"
    )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def _snapshot(repo_id: str) -> str:
    """Fetch a repository of heads from the Hugging Face hub, or find it in the hub's cache."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(repo_id, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"]))
