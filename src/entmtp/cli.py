"""The command line: parses, calls one function, prints. ``--help`` imports nothing heavy."""

import sys
from collections.abc import Sequence

import click

from entmtp import __version__
from entmtp.commands.bank import bank
from entmtp.commands.bench import bench
from entmtp.commands.calibrate import calibrate
from entmtp.commands.chat import chat
from entmtp.commands.check import check
from entmtp.commands.demo import demo
from entmtp.commands.explain import explain
from entmtp.commands.generate import generate
from entmtp.commands.heads import heads
from entmtp.commands.info import info
from entmtp.commands.pull import pull
from entmtp.commands.quality import quality
from entmtp.commands.trace import trace
from entmtp.commands.train import train
from entmtp.errors import EntmtpError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="entmtp")
def cli() -> None:
    """Faster LLM decoding with the same output.

    Light heads draft a tree of next tokens, the model checks the tree in one forward pass, and
    before every step the tree is chosen by the entropy of the model's own distribution.
    """


for command in (
    generate,
    chat,
    demo,
    explain,
    check,
    quality,
    trace,
    calibrate,
    bank,
    bench,
    train,
    heads,
    pull,
    info,
):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a failure that the user caused is one line and exit code 2."""
    try:
        code = cli.main(args=argv, prog_name="entmtp", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except EntmtpError as error:
        click.echo(f"Error: {error}", err=True)
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        code = 130
    sys.exit(code or 0)
