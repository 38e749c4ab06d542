"""Parameters of policies from the JSON of a bank."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from entmtp.errors import BankError, InputError

__all__ = ["read_params"]

_Params = TypeVar("_Params")


def read_params(kind: type[_Params], policy: str, document: Mapping[str, Any]) -> _Params:
    """Parameters of a class, lists as tuples.

    Raises:
        BankError: fields are missing, unknown, or do not fit together.
    """
    try:
        return kind(**{name: _as_tuples(value) for name, value in document.items()})
    except (TypeError, ValueError, InputError) as error:
        raise BankError(f"policy {policy}: not its parameters ({error})") from error


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_as_tuples(one) for one in value)
    return value
