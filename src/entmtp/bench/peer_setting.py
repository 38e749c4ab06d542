"""What other programs decode, and with what."""

from dataclasses import dataclass
from pathlib import Path

from entmtp.tokenizer import Tokenizer

__all__ = ["PeerSetting"]


@dataclass(frozen=True)
class PeerSetting:
    """What all peers of a run have in common.

    Attributes:
        model: a Hugging Face folder or a .gguf file.
        tokenizer: of the model.
        threads: of the CPU.
        context: most tokens of a prompt and its answer.
        scratch: folder for files that peers read.
        is_cpu: whether this program decodes on the CPU.
        vllm_python: Python of an environment that has vLLM; ``None``: this one.
    """

    model: Path
    tokenizer: Tokenizer
    threads: int
    context: int
    scratch: Path
    is_cpu: bool
    vllm_python: Path | None = None
