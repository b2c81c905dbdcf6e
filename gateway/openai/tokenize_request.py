"""`POST /tokenize` and `POST /detokenize`: the requests and answers as vLLM defines them."""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from pydantic import Field

from gateway.chatglm.formats import chat_form
from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Grammar, PlainText, TokenIds
from gateway.openai.chat_request import Messages, conversation, note_names, without_neutral_messages
from gateway.openai.document import Reading, read_object, validate, without_neutral
from gateway.openai.generation_request import Items, NonEmpty, Strict, TokenId, at_most
from gateway.openai.long_list import long_list
from gateway.openai.structured import ResponseFormat, StructuredOutputs, one_grammar
from gateway.openai.tools import NamedChoice, Tools, offer_of_tools
from gateway.tokenization import Tokenization, Tokens
from wire.limits import IDS_LIMIT

UNSUPPORTED: Mapping[str, Any] = MappingProxyType({"chat_template": None, "continue_final_message": False})
"""Parameters that would change the answer and are not supported, each with the value that has no effect."""


OF_MESSAGES: Final = (
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "add_generation_prompt",
)


class TokenizeRequest(Strict):
    """A text, or a conversation as in a chat request, with the parameters that decide how its answer begins.

    Null means absent everywhere.
    """

    model: NonEmpty
    prompt: Annotated[str | None, Field(description="a text; or else messages")] = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="of messages: up to where the answer begins; true unless given")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="of a prompt: with the ids that begin every prompt; true unless given")
    ] = None
    return_token_strs: Annotated[bool | None, Field(description="also tell how each token is shown")] = None

    def check_combinations(self) -> None:
        """Refuse parameters that are valid alone but not together.

        Raises:
            InvalidRequestError: with the field in `param`.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError(
                "Exactly one of prompt and messages is needed.",
                param="prompt" if self.messages is None else "messages",
            )
        if self.messages is None:
            for field in OF_MESSAGES:
                if getattr(self, field) is not None:
                    raise InvalidRequestError(f"{field} belongs to messages.", param=field)
        elif self.add_special_tokens:
            raise InvalidRequestError(
                "Messages have the ids that begin every prompt; add_special_tokens would add them again.",
                param="add_special_tokens",
            )
        _ = self._asked, self._grammar  # which refuse what is wrong with them

    def tokenization(self, *, request_id: str, deadline: float) -> Tokenization:
        """Return the tokenization to run."""
        return Tokenization(
            request_id=request_id,
            model=self.model,
            prompt=self._asked,
            deadline=deadline,
            prefix=self.add_special_tokens is not False,
            answer_next=self.add_generation_prompt is not False,
            grammar=self._grammar,
            strings=bool(self.return_token_strs),
        )

    @property
    def subject(self) -> str:
        """The name of the field to be tokenized."""
        return "messages" if self.prompt is None else "prompt"

    @cached_property
    def _asked(self) -> Conversation | PlainText:
        if self.prompt is not None:
            return PlainText(self.prompt)
        return conversation(self.messages or (), offer_of_tools(self.tools, self.tool_choice, parallel=None))

    @cached_property
    def _grammar(self) -> Grammar | None:
        formatted = self.response_format.grammar("response_format") if self.response_format else None
        return one_grammar(self.structured_outputs, formatted, "response_format")


class DetokenizeRequest(Strict):
    """Ids of a model's tokens."""

    model: NonEmpty
    tokens: Annotated[Items[TokenId], at_most(IDS_LIMIT)]

    def tokenization(self, *, request_id: str, deadline: float) -> Tokenization:
        """Return the tokenization to run."""
        return Tokenization(
            request_id=request_id, model=self.model, prompt=TokenIds(tuple(self.tokens)), deadline=deadline
        )

    @property
    def subject(self) -> str:
        """The name of the field with the ids."""
        return "tokens"


def _list_of(kind: str) -> Meta:
    return Meta(extra_json_schema={"type": "array", "items": {"type": kind}})


class TokenizeAnswer(Struct, frozen=True, kw_only=True):
    """The ids. `max_model_len` counts tokens of prompt and answer together."""

    count: int
    max_model_len: int | None
    tokens: Annotated[Raw, _list_of("integer")]
    token_strs: Annotated[Raw, _list_of("string")] | UnsetType = UNSET


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """A model's tokenizer, in the words of its published configuration.

    There is no `chat_template`: conversations are rendered on the model's side, and `/tokenize` does it too.
    """

    tokenizer_class: str
    bos_token: str | None
    eos_token: str
    pad_token: str
    model_max_length: int | None


class DetokenizeAnswer(Struct, frozen=True):
    """The text of the ids, without special tokens."""

    prompt: str


def tokenizer_info(chat_format: str, max_context: int | None) -> TokenizerInfo:
    """Describe the tokenizer of a model with this chat format and a context of `max_context` tokens.

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
    )


async def tokenize_answer(tokens: Tokens, max_context: int | None) -> TokenizeAnswer:
    """Write the ids of a prompt for a model with a context of `max_context` tokens.

    Raises:
        UpstreamProtocolError: the upstream's `token_strs` cannot be understood.
    """
    return TokenizeAnswer(
        count=len(tokens.ids),
        max_model_len=max_context,
        tokens=await long_list(tokens.ids),
        token_strs=UNSET if tokens.strings is None else await long_list(tokens.strings),
    )


def read_tokenize_request(body: bytes, reading: Reading | None = None) -> TokenizeRequest:
    """Decode and check a request body; `reading` notes what of it is ignored, by default nothing is.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    document = without_neutral_messages(without_neutral(read_object(body), UNSUPPORTED))
    request = validate(TokenizeRequest, document, reading)
    note_names(request.messages or (), reading)
    request.check_combinations()
    return request


def read_detokenize_request(body: bytes, reading: Reading | None = None) -> DetokenizeRequest:
    """Decode and check a request body; `reading` notes what of it is ignored, by default nothing is.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    return validate(DetokenizeRequest, read_object(body), reading)
