"""Tokenizers of Hugging Face folders and GGUF files.

A folder's tokenizer.json is read with the ``tokenizers`` package alone: importing transformers
takes seconds, and is left to folders and files that need it.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from entmtp.errors import CheckpointError, InputError, UnsupportedModelError
from entmtp.loading.chat_template import ChatTemplate, find_template
from entmtp.target.gguf_file import GGUFFile, read_gguf
from entmtp.target.json_file import read_json
from entmtp.tokenizer import Message, Tokenizer

__all__ = ["convert_gguf_tokenizer", "load_tokenizer"]

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FALLBACK_FILES = ("tokenizer.model", "vocab.json", "tekken.json")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_PLAIN_SPLITS = ("default", "gpt-2")
_REGEX_SPLITS = ("llama3", "llama-v3", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken")


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder.

    Args:
        path: a folder with tokenizer.json, or with files from which transformers can make one.

    Raises:
        CheckpointError: the files are missing or damaged.
    """
    settings = _optional_json(path / "tokenizer_config.json")
    special = _special_tokens(_optional_json(path / "special_tokens_map.json"))
    special.update(_special_tokens(settings))
    if (path / "tokenizer.json").is_file():
        backend = _read_backend(path / "tokenizer.json")
    elif any((path / name).is_file() for name in _FALLBACK_FILES):
        backend, more = _through_transformers(path)
        special = {**more, **special}
    else:
        raise CheckpointError(
            f"{path} has no tokenizer.json ({', '.join(_FALLBACK_FILES)} neither): "
            "fetch the model again, its tokenizer included"
        )
    backend.no_truncation()
    backend.no_padding()
    source = find_template(path, settings)
    return _FolderTokenizer(
        backend, special, ChatTemplate(source) if source else None, _declared_eos(path)
    )


def convert_gguf_tokenizer(gguf_file: Path, folder: Path) -> None:
    """Make the tokenizer files of a Hugging Face folder from the metadata of a GGUF file.

    Takes seconds, through transformers. ``tokenizer.json`` is put in place last, so a folder that
    has one has the rest.

    Args:
        gguf_file: a file with its tokenizer inside.
        folder: where the files go; it is made if need be.

    Raises:
        CheckpointError: the file is damaged or holds no tokenizer.
        UnsupportedModelError: its kind of tokenizer cannot be rebuilt exactly.
        OSError: the disk is full or not writable.
    """
    header = read_gguf(gguf_file)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{gguf_file} holds no tokenizer: use the model's original folder")
    settings = _gguf_settings(header, tokens)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder) as temporary:
        made = Path(temporary)
        backend = _gguf_backend(header)
        (made / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
        _write_json(made / "tokenizer_config.json", settings)
        _write_json(made / "generation_config.json", _gguf_ids(header))
        for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
            os.replace(made / name, folder / name)


class _FolderTokenizer:
    """Implements :class:`entmtp.tokenizer.Tokenizer` on a tokenizer of ``tokenizers``."""

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str],
        template: ChatTemplate | None,
        eos_ids: Iterable[int],
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._template = template
        own = self._special_tokens.get("eos_token")
        own_id = backend.token_to_id(own) if own is not None else None
        self._eos_ids = frozenset(eos_ids) | ({own_id} if own_id is not None else set())

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise InputError("the model has no chat template: give it raw text instead")
        text = self._template.render(messages, self._special_tokens)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode ({error}); give it in UTF-8"
            ) from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)


def _read_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(
            f"{path} is not a valid tokenizer ({error}): fetch the model again"
        ) from error


def _through_transformers(path: Path) -> tuple[Any, dict[str, str]]:
    """Let transformers build a tokenizer from older files."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # tokenizers raises plain Exception, transformers many kinds
        advice = "add its tokenizer.json"
        if (path / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
            advice += ", or read tokenizer.model with: pip install 'entmtp[sentencepiece]'"
        raise CheckpointError(
            f"no tokenizer can be made from {path} ({_first_line(error)}): {advice}"
        ) from error
    return backend, _special_tokens(tokenizer.special_tokens_map)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; each is a string or an object with its content."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _declared_eos(path: Path) -> set[int]:
    """End-of-text ids that the model's own configuration names."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(path / name).get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return ids


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _gguf_ids(header: GGUFFile) -> dict[str, int | list[int]]:
    """Ids of special tokens; a turn may end otherwise than a text."""
    get = header.metadata.get
    ids: dict[str, int | list[int]] = {}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        value = get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[f"{name}_token_id"] = value
    ends = [get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    known = [value for value in dict.fromkeys(ends) if value is not None]
    if known:
        ids["eos_token_id"] = known if len(known) > 1 else known[0]
    return ids


def _gguf_settings(header: GGUFFile, tokens: Sequence[str]) -> dict[str, Any]:
    get = header.metadata.get
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in keys.items():
        index = get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            settings[f"{name}_token"] = tokens[index]
    template = get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings


def _gguf_backend(header: GGUFFile) -> Any:
    """The tokenizer of ``tokenizers`` that a GGUF file describes."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = header.path
    split = header.metadata.get("tokenizer.ggml.pre", "default")
    is_byte_level = header.metadata.get("tokenizer.ggml.model") == "gpt2"
    known = (*_SINGLE_DIGITS, *_PLAIN_SPLITS, *_REGEX_SPLITS)
    if is_byte_level and split not in known:
        raise UnsupportedModelError(
            f"{path}: pre-tokenizer {split!r} is not supported; supported are {', '.join(known)}; "
            "use the model's original folder with its tokenizer.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # tokenizers raises plain Exception, transformers many kinds
        raise CheckpointError(
            f"no tokenizer can be made from {path} ({_first_line(error)}): "
            "use the model's original folder"
        ) from error
    backend = tokenizer.backend_tokenizer
    if is_byte_level and split in _SINGLE_DIGITS:
        # transformers leaves this out; without it " 2" and the spaces before it split otherwise
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return backend
