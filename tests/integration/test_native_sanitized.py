"""The C++ of the native core under sanitizers, and its AVX-512 source on a CPU without AVX-512."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from entmtp.kernels import build as builder
from entmtp.kernels.build import build, find_compiler, library_file
from native_build_cases import copy_package, needs_compiler, python
from native_cases import ISAS, LONG

pytestmark = [needs_compiler, pytest.mark.slow]

PROGRAMS = Path(__file__).parents[1] / "native"
SIMDE = Path("/usr/include/simde/x86/avx512.h")
FLAGS = {
    "address": (
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,object-size,vptr",  # seen by the address sanitizer, or not used
        "-fno-sanitize-recover=all",
    ),
    "thread": ("-fsanitize=thread",),
}


def has_sanitizer(flags: Sequence[str], folder: Path) -> bool:
    """Whether a program under these flags is built and runs here."""
    (folder / "empty.cpp").write_text("int main() { return 0; }")
    out = folder / "empty"
    command = [find_compiler(), *flags, str(folder / "empty.cpp"), "-o", str(out)]
    built = subprocess.run(command, capture_output=True, check=False)
    if built.returncode:
        return False
    return subprocess.run([str(out)], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["sanitize", "sanitize_drafts"])
@pytest.mark.parametrize("kind", FLAGS)
def test_the_core_under_sanitizers(kind: str, name: str, tmp_path: Path) -> None:
    """Chunks, trees, commits, growth, threads and bad jobs: nothing found, every bit the same."""
    flags = FLAGS[kind]
    if not has_sanitizer(flags, tmp_path):
        pytest.skip(f"programs under {flags[0]} do not run here")
    library = build(tmp_path / library_file().name, ("-O1", "-g1", *flags))
    program = tmp_path / name
    command = [find_compiler(), "-std=c++20", "-pthread", "-g1", flags[0].split(",")[0]]
    command += ["-I", str(builder.FOLDER / "csrc"), str(PROGRAMS / f"{name}.cpp")]
    command += [str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(program)]
    subprocess.run(command, check=True)
    mode = ["shared"] if kind == "thread" else []
    done = subprocess.run(
        [str(program), *mode], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("OK\n")
    if kind == "address":
        assert all(f"\n{isa}, hidden" in f"\n{done.stdout}" for isa in ISAS)


@pytest.mark.skipif(not SIMDE.is_file(), reason="there are no headers of SIMDe")
@pytest.mark.skipif("avx2" not in ISAS, reason="the emulation needs AVX2")
def test_avx512_by_emulation_gives_the_bits_of_the_others(tmp_path: Path) -> None:
    """Its source, with every instruction in plain C++, for every model that the tests have."""
    library = build(tmp_path / library_file().name, ("-O1",), emulate_avx512=True)
    folder = copy_package(tmp_path / "copy", library)
    code = (
        "from native_cases import ISAS, assert_instruction_sets_agree as agree\n"
        "from draft_cases import assert_drafts_agree\n"
        f"for name in {LONG}: agree(name, ISAS)\n"
        "for name in ('qwen2', 'biased'): assert_drafts_agree(name, ISAS)\n"
        "from entmtp.kernels.library import Library, load_library\n"
        "cores = [Library(load_library().lib, (isa,)) for isa in ISAS]\n"
        "assert len({core.noise_words(7, 9, 1030).tobytes() for core in cores}) == 1\n"
        "print(*ISAS)"
    )
    done = python(folder, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "avx512 avx2 portable\n"


def test_what_is_compiled_here_is_what_ships() -> None:
    """No source is left out."""
    sources = {path.name for path in (builder.FOLDER / "csrc").glob("*.cpp")}
    assert sources == set(builder._SOURCES)
