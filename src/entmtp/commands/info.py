"""``entmtp info``: what is installed, what would run, and why."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from entmtp import __version__

__all__ = ["info"]

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show versions, devices, models, heads, trees and the backend that runs."""
    facts = _facts()
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        click.echo(f"{key + ':':<14}{text}")


def _facts() -> dict[str, Any]:
    import torch

    from entmtp.loading.assets import MODELS, home
    from entmtp.loading.drafters import shipped_heads
    from entmtp.topology import named_topologies

    has_cuda = torch.cuda.is_available()
    return {
        "entmtp": __version__,
        "python": platform.python_version(),
        "packages": [f"{name} {_version(name)}" for name in _PACKAGES],
        "device": torch.cuda.get_device_name() if has_cuda else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "backend": _backend(has_cuda),
        "home": str(home()),
        "models": [f"{name} ({_state(home() / 'models' / name)})" for name in MODELS],
        "streams": [
            line for name in MODELS if (line := _stream_memory(name, home() / "models" / name))
        ],
        "heads": shipped_heads(),
        "topologies": [f"{name} ({t.num_nodes})" for name, t in named_topologies().items()],
    }


def _state(folder: Path) -> str:
    """Whether a model is there, how long its texts may be, and what limits them."""
    from entmtp.errors import CheckpointError
    from entmtp.loading.assets import is_complete
    from entmtp.target.weights import read_config

    if not is_complete(folder):
        return "not pulled"
    try:
        config = read_config(folder)
    except CheckpointError:
        return "ready"
    limit = ", the reach of its sliding window" if config.is_window_capped else ""
    return f"ready, context window {config.context_window}{limit}"


def _stream_memory(name: str, folder: Path) -> str | None:
    """What keys and values of a sequence take; ``None`` where the model cannot tell."""
    from entmtp.errors import CheckpointError
    from entmtp.loading.assets import is_complete
    from entmtp.target.weights import read_config

    if not is_complete(folder):
        return None
    try:
        config = read_config(folder)
    except CheckpointError:
        return None
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    half, single = values * 2 / 1024, values * 4 / 1024
    return f"{name} {half:.1f} KB a token native, {single:.1f} KB in torch float32"


def _backend(has_cuda: bool) -> str:
    """What ``--backend auto`` takes, and why."""
    from entmtp.kernels.library import load_library, missing_reason

    library = load_library()
    if has_cuda:
        return "torch-cuda bfloat16 (there is a GPU)"
    if library is None:
        return f"torch-cpu float32 ({missing_reason()})"
    if library.isas[0] == "portable":
        return "torch-cpu float32 (this CPU lacks AVX2; --backend native runs, but slowly)"
    others = ", ".join(library.isas)
    return f"native-{library.isas[0]} int8 (this CPU runs {others})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
