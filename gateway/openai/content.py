"""What is kept of the bulk of a message: its text joined, and nothing of what a client only sends along.

A request waits in the gateway as it was read. Objects take some twenty times the memory of the JSON that they
came as, so what nobody reads is not kept, and pieces of a text are the text.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator

from gateway.openai.generation_request import Items


class _Piece(Protocol):
    text: str


def _forgotten(_value: Any) -> None:
    return None


def _joined(content: str | Sequence[_Piece]) -> str:
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


P = TypeVar("P", bound=_Piece)

Content = Annotated[str | Items[P], AfterValidator(_joined)]
"""A text, or pieces of one. Once read, it is the text: see `text_of`."""

Unread = Annotated[Any, AfterValidator(_forgotten)]
"""Any JSON value, of which nothing is kept."""


def text_of(content: str | Sequence[_Piece] | None) -> str:
    """Return a `Content` as the one text that it is by now; no content is no text."""
    return _joined(content or "")
