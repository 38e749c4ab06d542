"""Other programs that decode the same model, for comparison; none is needed to use this one."""

import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from entmtp.bench.methods import Method
from entmtp.bench.peer_setting import PeerSetting
from entmtp.bench.runs import Turn
from entmtp.bench.systems import System
from entmtp.bench.vllm import VllmSystem, missing_vllm
from entmtp.errors import UnsupportedModelError
from entmtp.loading.gguf_writer import write_gguf
from entmtp.loading.llamacpp import LlamaCpp, missing_llama_cpp
from entmtp.loading.loader import DTYPES
from entmtp.noise import NoiseSource
from entmtp.params import SamplingParams
from entmtp.sampling import choose_token

__all__ = ["COPIED_TOKENS", "open_peer", "peer_obstacle"]

COPIED_TOKENS = 10
"""Tokens that prompt lookup proposes at a time, here and in transformers."""

_CHUNK = 256  # prompt tokens that llama.cpp reads together


def peer_obstacle(method: Method, setting: PeerSetting) -> str | None:
    """Why a peer cannot run here; ``None`` where it can be tried.

    Raises:
        InputError: the Python that is named for vLLM is none.
    """
    if not setting.is_cpu:
        return "peers are compared on the CPU only"
    if method.peer == "vllm":
        return missing_vllm(setting)
    if method.peer == "llamacpp":
        return missing_llama_cpp()
    return None if setting.model.is_dir() else "transformers needs a folder, not a .gguf file"


def open_peer(method: Method, setting: PeerSetting) -> System:
    """Load a peer.

    Raises:
        UnsupportedModelError: it does not take the model.
    """
    if method.peer == "vllm":
        return VllmSystem(setting, method.variant)
    if method.peer == "llamacpp":
        file = setting.scratch / f"{method.variant}.gguf"
        write_gguf(setting.model, file, method.variant)
        return _LlamaCppSystem(file, setting)
    dtype, _, extra = method.variant.partition("+")
    return _TransformersSystem(setting, DTYPES[dtype], COPIED_TOKENS if extra else None)


class _Clock:
    """Notes when tokens come; what transformers calls a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then the tokens of each step."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is held back."""


class _TransformersSystem:
    """``generate`` of transformers with its own cache; implements :class:`System`."""

    def __init__(self, setting: PeerSetting, dtype: torch.dtype, num_copied: int | None) -> None:
        transformers: Any = import_module("transformers")  # without types for its functions
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        try:
            self._model: Any = load(setting.model, dtype=dtype).eval()
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UnsupportedModelError(
                f"transformers does not load the model ({reason})"
            ) from error
        self._make_config: Any = transformers.GenerationConfig
        self._tokenizer, self._context = setting.tokenizer, setting.context
        self._num_copied = num_copied

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """See :class:`System`."""
        torch.manual_seed(sampling.seed or 0)
        tokens, clock = torch.tensor([list(prompt)]), _Clock()
        started = time.perf_counter()
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=self._config(len(prompt), sampling),
            streamer=clock,
        )
        emitted = tuple(output[0, len(prompt) :].tolist())
        _, first, *_ = clock.times
        return Turn(
            tokens=emitted,
            text=self._tokenizer.decode(emitted),
            num_first=min(clock.counts[1], len(emitted)),
            prefill_s=first - started,
            decode_s=clock.times[-1] - first,
            num_steps=len(clock.times) - 2,
        )

    def _config(self, num_prompt: int, sampling: SamplingParams) -> Any:
        eos = sorted(self._tokenizer.eos_ids)
        chosen: dict[str, Any] = {"do_sample": False}
        if not sampling.is_greedy:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        return self._make_config(
            max_new_tokens=min(sampling.max_new_tokens, self._context - num_prompt),
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            use_cache=True,
            prompt_lookup_num_tokens=self._num_copied,
            **chosen,
        )


class _LlamaCppSystem:
    """llama.cpp, one token after another, by the same rule as here; implements :class:`System`."""

    def __init__(self, file: Path, setting: PeerSetting) -> None:
        self._model = LlamaCpp(
            file, threads=setting.threads, context=setting.context, max_rows=_CHUNK
        )
        self._tokenizer, self._context = setting.tokenizer, setting.context

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """See :class:`System`."""
        started = time.perf_counter()
        times, emitted = [], []
        for token in self._tokens(prompt, sampling):
            times.append(time.perf_counter())
            emitted.append(token)
        return Turn(
            tokens=tuple(emitted),
            text=self._tokenizer.decode(emitted),
            num_first=1,
            prefill_s=times[0] - started,
            decode_s=times[-1] - times[0],
            num_steps=len(times) - 1,
        )

    def _tokens(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[int]:
        self._model.truncate(0)
        for start in range(0, len(prompt) - 1, _CHUNK):
            end = min(start + _CHUNK, len(prompt) - 1)
            self._model.forward(prompt[start:end], logits=False)
        noise: NoiseSource | None = None
        token = prompt[-1]
        last = min(len(prompt) + sampling.max_new_tokens, self._context)
        for position in range(len(prompt), last):
            row = self._model.forward([token])[0]
            if sampling.is_greedy:
                token = int(np.argmax(row))
            else:
                noise = noise or NoiseSource(sampling.seed or 0, len(row))
                logits = torch.from_numpy(row)
                token = choose_token(
                    logits, sampling, sampling.seed or 0, position, ((), ()), noise
                )
            yield token
            if token in self._tokenizer.eos_ids:
                return
