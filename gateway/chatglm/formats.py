"""What the gateway knows of each chat format: which conversations it can express, and how it writes tools."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gateway.chatglm.call_readers import CallReader, FencedCallReader, JsonCallReader, OnPart
from gateway.chatglm.literal_reader import LiteralCallReader
from gateway.errors import UpstreamProtocolError
from wire.calls import NOTATIONS, CallNotation

INSTRUCTION: Final = (
    "Answer the following questions as best as you can. You have access to the following tools:"
)
"""What ChatGLM3 was trained to read before its tools."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a format writes tools."""

    notation: CallNotation
    read: Callable[[str, OnPart], CallReader]
    """Makes a reader for a call of the named tool."""
    read_enforced: Callable[[str, OnPart], CallReader]
    """The same for a call whose form a grammar enforces."""
    instruction: str | None = None
    """The text that the model was trained to read before its tools, unless the prompt format adds it."""


@dataclass(frozen=True, slots=True)
class TokenizerForm:
    """The published tokenizer of a format: its class and its special tokens. None has a BOS token."""

    name: str
    eos_token: str
    pad_token: str


_SENTENCE_PIECES: Final = TokenizerForm("ChatGLMTokenizer", "</s>", "<unk>")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """One chat format."""

    name: str
    """As models report it."""
    title: str
    """For people."""
    tokenizer: TokenizerForm
    tools: ToolForm | None = None
    """None: no tools, and a conversation is rounds of question and answer. Otherwise every message is a
    turn."""


_FORMS: Final[Mapping[str, ChatForm]] = MappingProxyType(
    {
        form.name: form
        for form in (
            ChatForm("chatglm2", "ChatGLM2", _SENTENCE_PIECES),
            ChatForm(
                "chatglm3",
                "ChatGLM3",
                _SENTENCE_PIECES,
                ToolForm(NOTATIONS["chatglm3"], FencedCallReader, LiteralCallReader, INSTRUCTION),
            ),
            ChatForm(
                "glm4",
                "GLM-4",
                TokenizerForm("ChatGLM4Tokenizer", "<|endoftext|>", "<|endoftext|>"),
                ToolForm(NOTATIONS["glm4"], JsonCallReader, JsonCallReader),
            ),
        )
    }
)


def chat_form(name: str) -> ChatForm:
    """Return the format that a model reports as `name`.

    Raises:
        UpstreamProtocolError: there is none of that name.
    """
    form = _FORMS.get(name)
    if form is None:
        raise UpstreamProtocolError(f"the model's chat format {name!r} is not known to this gateway")
    return form
