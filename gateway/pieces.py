"""The pieces of an answer, text and tool calls, in the order in which the model wrote them."""

from collections.abc import Iterable

from msgspec import Struct


class Call(Struct, frozen=True):
    """A call of a tool. `arguments` is text that should be a JSON object; the model may write other text."""

    name: str
    arguments: str


class CallPart(Struct, frozen=True):
    """Part of a call. One with a name begins a call; one without continues the last call's arguments."""

    name: str | None
    arguments: str


def joined_calls(parts: Iterable[CallPart]) -> list[Call]:
    """Join `parts` into whole calls; the first part must have a name."""
    calls: list[Call] = []
    for part in parts:
        if part.name is not None:
            calls.append(Call(part.name, part.arguments))
        else:
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return calls


Piece = str | CallPart
"""Text, with everything that belongs to the chat format removed, or part of a call."""


def joined_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the same answer in as few pieces as possible, without empty texts."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str):
            if isinstance(last, str):
                joined[-1] = last + piece
            elif piece:
                joined.append(piece)
        elif piece.name is None and isinstance(last, CallPart):
            joined[-1] = CallPart(last.name, last.arguments + piece.arguments)
        else:
            joined.append(piece)
    return tuple(joined)
