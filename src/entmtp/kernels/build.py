"""Compiles the native library beside this file: ``python -m entmtp.kernels.build``.

Needs a C++20 compiler (``CXX``, else c++, g++ or clang++) and nothing else. Every instruction set
has a source file of its own, compiled with its own flags; which one runs is chosen at run time.
Imports nothing of entmtp, so that an installation can call it.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["BuildError", "build", "find_compiler", "is_current", "library_file"]

FOLDER = Path(__file__).parent
_NAMES = {"Linux": "libentmtp.so", "Darwin": "libentmtp.dylib", "Windows": "entmtp.dll"}
_COMMON = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi")
_EMULATE = "-DENTMTP_EMULATE_AVX512"
_X86 = ("x86_64", "AMD64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mprefer-vector-width=512",
)
_SOURCES: dict[str, tuple[str, ...]] = {
    "api.cpp": (),
    "drafts.cpp": (),
    "engine.cpp": (),
    "noise.cpp": (),
    "rate.cpp": (),
    "trees.cpp": (),
    "isa_portable.cpp": (),
    "isa_avx2.cpp": _AVX2,
    "isa_avx512.cpp": _AVX512,
}
_EMULATED = {**_SOURCES, "isa_avx512.cpp": (*_AVX2, "-O1")}


class BuildError(Exception):
    """There is no compiler, or it failed; the message is one line."""


def library_file() -> Path:
    """Where the library lies once it is built."""
    return FOLDER / _NAMES.get(platform.system(), _NAMES["Linux"])


def is_current() -> bool:
    """Whether the library is there, and newer than all that it is built from."""
    library = library_file()
    sources = [Path(__file__), *(FOLDER / "csrc").iterdir()]
    if not library.is_file():
        return False
    return library.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def find_compiler() -> str:
    """A C++ compiler.

    Raises:
        BuildError: there is none.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler ({named or 'c++, g++ or clang++'}) was found")


def build(
    out: Path | None = None, extra: Sequence[str] = (), *, emulate_avx512: bool = False
) -> Path:
    """Compile and link; the library appears whole or not at all.

    Args:
        out: the library; by default beside this file.
        extra: flags for compiler and linker, such as ``-fsanitize=address``.
        emulate_avx512: compute AVX-512 in plain C++, slowly, so that it can be tested on a CPU
            without it; needs AVX2 and the headers of SIMDe.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    out = library_file() if out is None else out
    compiler = find_compiler()
    is_x86 = platform.machine() in _X86
    sources, defines = (_EMULATED, (_EMULATE,)) if emulate_avx512 else (_SOURCES, ())
    with tempfile.TemporaryDirectory() as temporary:
        folder, running, objects = Path(temporary), [], []
        for name, flags in sources.items():
            target = folder / f"{name}.o"
            command = [compiler, *_COMMON, *_WARNINGS, *defines, *(flags if is_x86 else ()), *extra]
            command += ["-c", str(FOLDER / "csrc" / name), "-o", str(target)]
            running.append((command, _start(command)))
            objects.append(str(target))
        errors = [process.communicate()[1] for _, process in running]  # until all have ended
        for (command, process), text in zip(running, errors, strict=True):
            _check(command, process, text)
        part = out.with_name(f".{out.name}.{os.getpid()}.part")
        command = [compiler, "-shared", "-pthread", *extra, *objects, "-o", str(part)]
        try:
            process = _start(command)
            _check(command, process, process.communicate()[1])
            os.replace(part, out)
        finally:
            part.unlink(missing_ok=True)
    return out


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error


def _check(command: Sequence[str], process: subprocess.Popen[str], errors: str) -> None:
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
        reason = lines[0].strip() if lines else f"exit code {process.returncode}"
        raise BuildError(f"{command[0]} failed: {reason}")


def main() -> int:
    """Build beside this file; exit code 1 where that fails."""
    try:
        print(build())  # noqa: T201 - a program of its own
    except BuildError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
