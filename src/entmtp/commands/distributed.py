"""Options of a cluster, and workers that load what this process has loaded."""

from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from entmtp.errors import InputError

if TYPE_CHECKING:
    from entmtp.calibrate.cluster import ClusterParams
    from entmtp.calibrate.distributed import Cluster
    from entmtp.engine import Engine

__all__ = ["Distribution", "cluster_options", "take_distribution"]

_DRAFTERS = ("auto", "hydra++", "hydra", "medusa", "mtp", "lookup", "none")


@dataclass(frozen=True)
class Distribution:
    """What a user wants to be done on a cluster.

    Attributes:
        params: where the workers are.
    """

    params: "ClusterParams"

    def open(
        self, engine: "Engine", options: dict[str, Any], *, is_timed: bool
    ) -> "AbstractContextManager[Cluster]":
        """Workers with the same engine.

        Args:
            engine: of this process.
            options: that it was loaded with.
            is_timed: see :func:`entmtp.calibrate.distributed.open_cluster`.
        """
        from entmtp.calibrate.distributed import open_cluster

        load = _loader(engine, options)
        return open_cluster(self.params, engine, options["model"], load, is_timed=is_timed)


def cluster_options(function: Any) -> Any:
    """Options that :func:`take_distribution` reads."""
    for option in (
        click.option(
            "--workers",
            type=int,
            default=None,
            help="Of the cluster; as many as there is room for if not given.",
        ),
        click.option(
            "--distributed",
            is_flag=False,
            flag_value="auto",
            default=None,
            metavar="[auto|local|HOST:PORT]",
            help="Trace and time on a Ray cluster (extra ray); without a value: one that runs on "
            "this machine, else one is started.",
        ),
    ):
        function = option(function)
    return function


def take_distribution(options: dict[str, Any]) -> Distribution | None:
    """Take the cluster options out of ``options``; ``None``: this process does all.

    Raises:
        InputError: values that cannot be, or Ray is not installed.
    """
    address, workers = options.pop("distributed"), options.pop("workers")
    if address is None:
        if workers is not None:
            raise InputError("--workers is of a cluster; give --distributed, too")
        return None
    from entmtp.calibrate.cluster import ClusterParams, import_ray

    params = ClusterParams(address, workers)
    import_ray()  # before a model is loaded
    return Distribution(params)


def _loader(engine: "Engine", options: dict[str, Any]) -> "Callable[[], Engine]":
    """What makes the same engine in another process, whatever the defaults would be there."""
    import torch

    from entmtp.loading.catalog import MODELS
    from entmtp.loading.loader import load

    backend, _, isa = engine.target.backend.partition("-")
    return partial(
        load,
        _anywhere(options["model"], MODELS),
        _anywhere(options["drafter"], _DRAFTERS),
        dtype=options["dtype"],
        device=engine.target.device.type,
        backend=backend,
        isa=isa if backend == "native" else "auto",
        threads=torch.get_num_threads(),
    )


def _anywhere(name: str, names: Container[str]) -> str:
    """A path as it is called from every folder; a name as it is."""
    from entmtp.loading.assets import user_path

    path = user_path(name)
    return str(path.resolve()) if name not in names and path.exists() else name
