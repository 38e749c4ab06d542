"""How a processor is called."""

from pathlib import Path

import pytest

from entmtp import machine

X86 = (
    "processor : 0\ncpu family : 23\nmodel : 1\nmodel name : AMD EPYC\n\nprocessor : 1\nmodel : 9\n"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86, "AMD EPYC, family 23, model 1"),
        ("processor : 0\nBogoMIPS : 50\n\nModel : Raspberry Pi 5 Model B Rev 1.0\n", "Raspberry"),
        ("processor : 0\nmodel name :\n", ""),
        (None, ""),
    ],
)
def test_the_name_tells_processors_apart(
    text: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Family and model where there are any; the architecture where the system says nothing."""
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "_CPU_INFO", file)
    machine.cpu_name.cache_clear()
    try:
        found = machine.cpu_name()
    finally:
        machine.cpu_name.cache_clear()
    assert found.startswith(name)
    assert found
