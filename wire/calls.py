"""How each chat format writes a tool call: the content of the turn whose metadata is the tool's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from wire import fenced_calls, json_calls


@dataclass(frozen=True, slots=True)
class CallNotation:
    """How one format writes a call's arguments. Nothing is ever evaluated."""

    write: Callable[[Mapping[str, Any]], str]
    """Returns the content of a call with these arguments, which are JSON values."""
    read: Callable[[str], dict[str, Any] | None]
    """Returns the arguments of a call as JSON values; None: the content is no call."""


NOTATIONS: Final[Mapping[str, CallNotation]] = MappingProxyType(
    {
        "chatglm3": CallNotation(fenced_calls.write_call, fenced_calls.read_call),
        "glm4": CallNotation(json_calls.write_call, json_calls.read_call),
    }
)
"""The notation of each chat format that has tools."""
