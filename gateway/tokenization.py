"""Counting tokens: a prompt turned into the model's token ids, or ids into text.

The prompt is the same as a generation's (`gateway.generation`) and rendered by the same code. Nothing here
knows JSON or tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from gateway.generation import Grammar, Prompt
from gateway.tracing import Headers


class Tokenization(Struct, frozen=True, kw_only=True):
    """What is to be tokenized: a conversation or text into ids; ids into text."""

    request_id: str
    model: str
    prompt: Prompt
    deadline: float
    """Of the event loop's clock, in seconds."""
    headers: Headers = ()
    """Further headers of the call upstream: the trace context."""
    prefix: bool = True
    """Of text: with the ids that begin every prompt in front, as a generation has them."""
    answer_next: bool = True
    """Of a conversation: up to where the model's answer begins, as a generation has it."""
    grammar: Grammar | None = None
    """Of a conversation: a constraint on the answer's text."""
    strings: bool = False
    """Also return how each token is displayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The ids of text or a conversation, perhaps a million, or the text of ids, without special ones."""

    ids: Sequence[int] = ()
    text: str = ""
    strings: Sequence[str] | None = None
    """How each token is displayed, if requested."""
