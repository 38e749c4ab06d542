"""Runs the command line: ``python -m entmtp``."""

from entmtp.cli import main

main()
