"""Counting tokens: a prompt turned into the model's token ids, or ids into text.

The prompt is the same as a generation's (`gateway.generation`) and rendered by the same code. Nothing here
knows JSON or tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.generation import Grammar, Prompt
from gateway.tracing import Headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """What is to be tokenised: a conversation or text into ids; ids into text."""

    request_id: str
    model: str
    prompt: Prompt
    deadline: float
    """Of the event loop's clock, in seconds."""
    headers: Headers = ()
    """Of the call upstream, beside the request's id: its place in a trace."""
    prefix: bool = True
    """Of text: with the ids that begin every prompt in front, as a generation has them."""
    answer_next: bool = True
    """Of a conversation: up to where the model's answer begins, as a generation has it."""
    grammar: Grammar | None = None
    """Of a conversation: what the answer's text will be held to."""
    strings: bool = False
    """Also tell how each token is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was asked for: ids of text or a conversation, or the text of ids, without special ones.

    There may be a million of them, too many for objects: they are read one after the other.
    """

    ids: Sequence[int] = ()
    text: str = ""
    strings: Iterable[str] | None = None
    """How each token is shown, where that was asked for; to be read once."""
