"""How vLLM is driven: a process of its own, by a package that stands in for it."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from entmtp.bench.methods import METHODS
from entmtp.bench.peer_setting import PeerSetting
from entmtp.bench.peers import open_peer, peer_obstacle
from entmtp.bench.runs import Turn
from entmtp.bench.vllm import VllmSystem, find_vllm
from entmtp.errors import EntmtpError, InputError, UnsupportedModelError
from entmtp.params import SamplingParams
from fake_vllm import VERSION, write_fake_vllm
from fakes import ByteTokenizer

GREEDY = SamplingParams(max_new_tokens=8, seed=0)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerSetting]:
    """An environment that has it; a model that nobody reads; token 40 stops."""
    write_fake_vllm(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    for name in ("model", "broken", "scratch"):
        (tmp_path / name).mkdir()
    find_vllm.cache_clear()
    tokenizer = ByteTokenizer(50, (40,))
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    yield PeerSetting(model, tokenizer, 1, 64, scratch, True, Path(sys.executable))
    find_vllm.cache_clear()


def decoded(setting: PeerSetting, method: str, prompt: tuple[int, ...]) -> Turn:
    """One text."""
    return open_peer(METHODS[method], setting).decode(prompt, GREEDY)


def test_a_token_a_step(setting: PeerSetting) -> None:
    """The first comes with the prompt; what the package prints is no answer."""
    turn = decoded(setting, "vllm", (1, 20))
    assert turn.tokens == tuple(range(21, 29))
    assert (turn.num_first, turn.num_steps, turn.num_decoded) == (1, 7, 7)
    assert turn.prefill_s > 0
    assert turn.decode_s > 0


def test_speculation_is_several_tokens_a_step(setting: PeerSetting) -> None:
    """One forward of the target for each."""
    turn = decoded(setting, "vllm-ngram", (1, 20))
    assert turn.tokens == tuple(range(21, 29))
    assert (turn.num_first, turn.num_steps) == (1, 2)


def test_texts_end_at_a_stop_and_at_the_window(setting: PeerSetting) -> None:
    """One process decodes one text after another."""
    system = VllmSystem(setting, "bfloat16")
    assert system.decode((38,), GREEDY).tokens == (39, 40)
    assert system.decode((20,) * 61, GREEDY).tokens == (21, 22, 23)
    assert system.decode((38,), GREEDY).num_steps == 1


def test_its_process_ends_with_it(setting: PeerSetting) -> None:
    """At the latest at the end of this one."""
    system = VllmSystem(setting, "bfloat16")
    process = system._process
    assert process.poll() is None
    del system
    assert process.poll() == 0


def test_a_model_that_it_refuses(setting: PeerSetting) -> None:
    """Its own words are told."""
    broken = replace(setting, model=setting.model.with_name("broken"))
    with pytest.raises(UnsupportedModelError, match="ValueError: no such architecture"):
        VllmSystem(broken, "bfloat16")


def test_its_death_is_told(setting: PeerSetting) -> None:
    """With the last words, and again when it is asked again."""
    system = VllmSystem(setting, "bfloat16")
    for _ in range(2):
        with pytest.raises(EntmtpError, match=r"ended unasked \(the last words\)"):
            system.decode((11,), GREEDY)


def test_why_it_is_left_out(setting: PeerSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on the CPU, without a folder, and where it is not installed."""
    method = METHODS["vllm"]
    assert peer_obstacle(method, setting) is None
    assert find_vllm(setting.vllm_python) == VERSION
    file = replace(setting, model=setting.model / "m.gguf")
    assert "needs a folder" in str(peer_obstacle(method, file))
    assert "CPU only" in str(peer_obstacle(method, replace(setting, is_cpu=False)))
    monkeypatch.delenv("PYTHONPATH")
    find_vllm.cache_clear()
    if find_vllm(None) is None:
        assert "--vllm-python" in str(peer_obstacle(method, replace(setting, vllm_python=None)))


def test_what_is_no_python(setting: PeerSetting, tmp_path: Path) -> None:
    """Neither a text nor a program that fails is one."""
    (tmp_path / "text").write_text("")
    for file in (tmp_path / "text", Path("/bin/false")):
        with pytest.raises(InputError, match="is no Python that runs"):
            find_vllm(file)
