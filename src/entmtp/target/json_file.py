"""A JSON object from a file, or an error that names the file."""

import json
from pathlib import Path
from typing import Any

from entmtp.errors import CheckpointError

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is absent, unreadable or no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}): fetch the model again"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch the model again")
    return data
