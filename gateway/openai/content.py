"""Message contents, kept small: parts joined into one text, and unread fields dropped.

A request waits in the gateway in its parsed form. Objects take some twenty times the memory of their JSON, so
what nobody reads is not kept, and the parts of a text become one string.
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
"""A text, or parts of one, which validation joins: see `text_of`."""

Unread = Annotated[Any, AfterValidator(_forgotten)]
"""Any JSON value; it is dropped."""


def text_of(content: str | Sequence[_Piece] | None) -> str:
    """Return a validated `Content` as the one string it is by now; no content is empty text."""
    return _joined(content or "")
