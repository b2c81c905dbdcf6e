"""Tool calls in the format of chat completions: whole, in chunks, and in the older form with functions."""

import secrets
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.pieces import Call, CallPart


class CalledFunction(Struct, frozen=True):
    """A function's name and arguments; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """One call of an answer. Its result refers to `id`."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CalledFunctionDelta(Struct, frozen=True):
    """What a chunk adds to a call: first the whole name, then arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """What a chunk adds to the call `index`; id and type come once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta | UnsetType = UNSET


def tool_call(call: Call) -> ToolCall:
    """Write a whole call, with a new id."""
    return ToolCall(new_call_id(), CalledFunction(call.name, call.arguments))


def function_call(call: Call) -> CalledFunction:
    """Write a whole call in the older form."""
    return CalledFunction(call.name, call.arguments)


def tool_call_deltas(part: CallPart, index: int) -> list[ToolCallDelta]:
    """Write a part of the call `index`, one item per chunk: its head, with a new id, then arguments."""
    head, *more = function_call_deltas(part)
    if part.name is None:
        return [ToolCallDelta(index, function=head)]
    begin = ToolCallDelta(index, id=new_call_id(), type="function", function=head)
    return [begin, *(ToolCallDelta(index, function=each) for each in more)]


def function_call_deltas(part: CallPart) -> list[CalledFunctionDelta]:
    """Write a part of a call in the older form, one item per chunk."""
    more = CalledFunctionDelta(arguments=part.arguments)
    return [more] if part.name is None else [CalledFunctionDelta(name=part.name, arguments=""), more]


def new_call_id() -> str:
    """Make the id that a call's result refers to."""
    return f"call_{secrets.token_hex(12)}"
