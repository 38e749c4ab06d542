"""Running the command line in this process, for every end-to-end test."""

import shlex

import pytest

from entmtp.cli import main
from running import Outcome, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process; paths are filled in by ``str.format``."""

    def run_command(line: str, **paths: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main(shlex.split(line.format(**paths)))
        captured = capsys.readouterr()
        code = done.value.code
        assert isinstance(code, int)
        return Outcome(code, captured.out, captured.err)

    return run_command
