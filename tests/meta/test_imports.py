"""The command line and the package are light to import."""

import subprocess
import sys

import pytest

HEAVY = {"gguf", "huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "transformers"}


def imported_by(*arguments: str) -> set[str]:
    """Top-level packages that a fresh interpreter imports for these arguments."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = done.stderr.splitlines()
    others = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(others)
    names = [line.rsplit("|", 1)[1].strip() for line in lines if line not in others]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "entmtp", "--help"),
        ("-c", "import entmtp.cli"),
        ("-c", "import entmtp; entmtp.__all__, entmtp.__version__"),
    ],
    ids=["help", "cli", "package"],
)
def test_no_heavy_package_is_imported(arguments: tuple[str, ...]) -> None:
    """Help and errors of use come at once, not after seconds of importing torch."""
    packages = imported_by(*arguments)
    assert "entmtp" in packages
    assert packages & HEAVY == set()


def test_every_public_name_exists() -> None:
    """Names that are resolved late are resolved all the same."""
    import entmtp

    assert [name for name in entmtp.__all__ if not hasattr(entmtp, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Late resolution does not change what a wrong name raises."""
    import entmtp

    with pytest.raises(AttributeError, match="no_such_name"):
        entmtp.no_such_name  # noqa: B018
