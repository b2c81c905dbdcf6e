"""How the chat formats write the call of a tool: behind its name, which is the metadata of the turn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from wire import fenced_calls, json_calls


@dataclass(frozen=True, slots=True)
class CallNotation:
    """How one format writes the arguments of a call. Nothing of it is ever evaluated."""

    write: Callable[[Mapping[str, Any]], str]
    """Returns the content of a call with these arguments, values as JSON has them."""
    read: Callable[[str], dict[str, Any] | None]
    """Returns the arguments of a call, which JSON can express; None: the content is no call."""


NOTATIONS: Final[Mapping[str, CallNotation]] = MappingProxyType(
    {
        "chatglm3": CallNotation(fenced_calls.write_call, fenced_calls.read_call),
        "glm4": CallNotation(json_calls.write_call, json_calls.read_call),
    }
)
"""By chat format, of those with tools."""
