"""Chat templates of Hugging Face models: found, compiled, rendered.

Templates are untrusted code, so they run in a sandbox; what they may use beyond plain Jinja is
what transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from entmtp.errors import CheckpointError, InputError
from entmtp.tokenizer import Message

__all__ = ["ChatTemplate", "find_template"]

_VICUNA = (
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% elif m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Vicuna has no turn of the role ' + m['role']) }}{% endif %}"
    "{% endfor %}ASSISTANT:"
)
"""The format that Vicuna 1.1 and later were trained on; their folders carry no template."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Compile.

        Raises:
            CheckpointError: the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template of the model is not valid ({error}): fetch the model again"
            ) from error

    def render(self, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
        """Text of a conversation up to where the assistant begins to speak.

        Args:
            special_tokens: ``bos_token`` and the like, as the template names them.

        Raises:
            InputError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InputError(
                f"the model's chat template refuses these messages: {error}; "
                "check their roles, contents and order"
            ) from error


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The default chat template of a model folder, or None.

    A file of its own comes before the key of tokenizer_config.json, as in transformers. Folders
    of Vicuna, known by their path, have neither: theirs is built in.

    Raises:
        CheckpointError: there are several named templates and none is the default.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {str(item.get("name")): str(item.get("template")) for item in template}
        if "default" not in named:
            raise CheckpointError(
                f"{folder} has the chat templates {', '.join(sorted(named))} but none named "
                "'default': name one so in tokenizer_config.json"
            )
        return named["default"]
    if isinstance(template, str):
        return template
    return _VICUNA if "vicuna" in str(folder.resolve()).lower() else None


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant says, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
