"""From names and files to targets, tokenizers and engines. Nothing heavy is imported until used."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["load", "pull"]

if TYPE_CHECKING:
    from entmtp.loading.assets import pull
    from entmtp.loading.loader import load

_HOMES = {"load": "entmtp.loading.loader", "pull": "entmtp.loading.assets"}


def __getattr__(name: str) -> object:
    """Import a name from its module on first use: ``pull`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'entmtp.loading' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
