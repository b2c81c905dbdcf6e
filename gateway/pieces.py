"""What answers are made of: text and calls of tools, in pieces, in the order that the model wrote them."""

from collections.abc import Iterable

from msgspec import Struct


class Call(Struct, frozen=True):
    """The model calls a tool. `arguments` is meant to be a JSON object, as text."""

    name: str
    arguments: str


class CallPart(Struct, frozen=True):
    """A call as it comes: one with a name begins the next call, one without goes on with its arguments."""

    name: str | None
    arguments: str


def joined_calls(parts: Iterable[CallPart]) -> list[Call]:
    """Return the calls that `parts` are, the first of which has a name."""
    calls: list[Call] = []
    for part in parts:
        if part.name is not None:
            calls.append(Call(part.name, part.arguments))
        else:
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return calls


Piece = str | CallPart
"""Of an answer, in its order: text, which is final in format, or what came of a call."""


def joined_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the same answer in as few pieces as there can be, none of them empty text."""
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
