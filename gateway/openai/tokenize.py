"""`/tokenize`, `/detokenize` and `/tokenizer_info`: requests and answers, as vLLM has them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from pydantic import Field

from gateway.chat.conversation import chat_form
from gateway.core.request import Conversation, Grammar, PlainText, TokenIds
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import Effort, Messages, Switches, conversation
from gateway.openai.document import Body, Items, at_most, if_read
from gateway.openai.params import TokenId
from gateway.openai.structured import ResponseFormat, StructuredRequest, format_grammar
from gateway.openai.tools import ToolsRequest
from wire.limits import IDS_LIMIT

_OF_MESSAGES: Final = (
    *(name for name in (*ToolsRequest.model_fields, *StructuredRequest.model_fields) if name != "model"),
    "response_format",
    "add_generation_prompt",
    "reasoning_effort",
    "chat_template_kwargs",
)


class CountingRequest(StructuredRequest, ABC):
    """A request for the tokens of a prompt. Null means absent everywhere."""

    @cached_property
    @abstractmethod
    def continued(self) -> Conversation | PlainText:
        """The prompt."""

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        _ = self.continued, self.grammar  # which refuse what is wrong with them

    def tokenization(self, *, request_id: str, deadline: float) -> Tokenization:
        """Return the tokenization to run."""
        return Tokenization(
            request_id=request_id,
            model=self.model,
            prompt=self.continued,
            deadline=deadline,
            grammar=self.grammar,
        )


class TokenizeRequest(ToolsRequest, CountingRequest):
    """A text, or a conversation as in a chat request, with the parameters that decide how its answer begins.

    Null means absent everywhere.
    """

    unsupported: ClassVar[Mapping[str, Any]] = {"chat_template": None, "continue_final_message": False}

    prompt: Annotated[str | None, Field(description="a text; or else messages")] = None
    messages: Messages | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="of messages: up to where the answer begins; true unless given")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="of a prompt: with the ids that begin every prompt; true unless given")
    ] = None
    reasoning_effort: Annotated[Effort, if_read("reasoning_effort", "reasoning_effort")] = None
    chat_template_kwargs: Switches = None
    return_token_strs: Annotated[bool | None, Field(description="also tell how each token is shown")] = None

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Exactly one of prompt and messages is needed.", param=self.subject)
        if self.messages is None:
            for field in _OF_MESSAGES:
                if getattr(self, field) is not None:
                    raise InvalidRequestError(f"{field} belongs to messages.", param=field)
        elif self.add_special_tokens:
            raise InvalidRequestError(
                "Messages have the ids that begin every prompt; add_special_tokens would add them again.",
                param="add_special_tokens",
            )
        super().check()

    def tokenization(self, *, request_id: str, deadline: float) -> Tokenization:
        """Return the tokenization to run."""
        return replace(
            super().tokenization(request_id=request_id, deadline=deadline),
            prefix=self.add_special_tokens is not False,
            answer_next=self.add_generation_prompt is not False,
            strings=bool(self.return_token_strs),
        )

    @property
    def subject(self) -> str:
        """The name of the field to be tokenized."""
        return "prompt" if self.messages is None else "messages"

    @cached_property
    def continued(self) -> Conversation | PlainText:
        """The text, or the conversation and the tools."""
        if self.prompt is not None:
            return PlainText(self.prompt)
        return conversation(
            self.messages or (), self.offer(single=False), self.reasoning_effort, self.chat_template_kwargs
        )

    @property
    def formatted(self) -> Grammar | None:
        """The grammar that `response_format` asks for."""
        return format_grammar(self.response_format)


class DetokenizeRequest(Body):
    """Ids of a model's tokens."""

    subject: ClassVar[str] = "tokens"
    """The name of the field with the ids."""

    tokens: Annotated[Items[TokenId], at_most(IDS_LIMIT)]

    def tokenization(self, *, request_id: str, deadline: float) -> Tokenization:
        """Return the tokenization to run."""
        return Tokenization(
            request_id=request_id, model=self.model, prompt=TokenIds(tuple(self.tokens)), deadline=deadline
        )


class TokenizeAnswer(Struct, frozen=True, kw_only=True):
    """The ids. `max_model_len` counts tokens of prompt and answer together."""

    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: Sequence[str] | UnsetType = UNSET


class DetokenizeAnswer(Struct, frozen=True):
    """The text of the ids, without special tokens."""

    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """A model's tokenizer, in the words of its published configuration.

    There is no `chat_template`: conversations are rendered on the model's side, and `/tokenize` does it too.
    """

    tokenizer_class: str
    bos_token: str | None
    eos_token: str
    pad_token: str
    model_max_length: int | None
    vocab_size: int | None
    """Number of ids that a prompt may have; None: the model does not tell."""


def tokenizer_info(chat_format: str, max_context: int | None, vocabulary: int | None) -> TokenizerInfo:
    """Describe the tokenizer of a model, given what its `ModelCard` says.

    Raises:
        UpstreamProtocolError: the chat format is not known here.
    """
    form = chat_form(chat_format).tokenizer
    return TokenizerInfo(
        tokenizer_class=form.name,
        bos_token=None,
        eos_token=form.eos_token,
        pad_token=form.pad_token,
        model_max_length=max_context,
        vocab_size=vocabulary,
    )


def tokenize_answer(tokens: Tokens, max_context: int | None) -> TokenizeAnswer:
    """Write the ids of a prompt for a model with a context of `max_context` tokens."""
    return TokenizeAnswer(
        count=len(tokens.ids),
        max_model_len=max_context,
        tokens=tokens.ids,
        token_strs=UNSET if tokens.strings is None else tokens.strings,
    )
