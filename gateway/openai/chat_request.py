"""`POST /v1/chat/completions`: the request as OpenAI defines it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from msgspec.structs import replace
from pydantic import Field

from gateway.chatglm.tool_offer import call_rules
from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Generation, Grammar, Message, MessageRole, PastCall, ToolOffer
from gateway.openai import generation_request
from gateway.openai.any_completion_request import AnyCompletionRequest
from gateway.openai.content import Content, Unread, text_of
from gateway.openai.document import read_object, validate, without_neutral
from gateway.openai.generation_request import (
    MESSAGES_LIMIT,
    Items,
    Strict,
    TokenBound,
    at_most,
    without_neutral_options,
)
from gateway.openai.structured import ResponseFormat, StructuredRequest, one_grammar, refuse_open_ends
from gateway.openai.tools import (
    FunctionCall,
    FunctionName,
    Functions,
    MessageCall,
    NamedChoice,
    Tools,
    offer_of_functions,
    offer_of_tools,
)
from wire.limits import TOP_LOGPROBS_LIMIT

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        **generation_request.NOT_YET,
        "audio": None,
        "chat_template_kwargs": None,
        "modalities": ["text"],
        "moderation": None,
        "prediction": None,
        "prompt_cache_options": None,
        "prompt_cache_retention": None,
        "reasoning_effort": None,
        "verbosity": None,
        "web_search_options": None,
    }
)
"""Parameters of the API that are not supported yet, each with the value that has no effect."""

MESSAGE_NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        "annotations": [],
        "audio": None,
        "reasoning_content": None,
        "refusal": None,
    }
)
"""The same for a message. Our own answers, when sent back unchanged, contain some of them as null."""

_DEPRECATED = Field(json_schema_extra={"deprecated": True})  # `deprecated=True` would warn at each access

_ROLES: Mapping[str, MessageRole] = MappingProxyType({"developer": "system", "function": "tool"})


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message; `developer` is another name for `system`, and `function` an older one for `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content[TextPart] | None = None
    name: Annotated[str | None, Field(description="of the function whose result it is")] = None
    tool_call_id: str | None = None
    tool_calls: Items[MessageCall] | None = None
    function_call: FunctionCall | None = None
    parsed: Annotated[
        Unread, Field(description="bookkeeping: the SDK sends along what it made of `content`")
    ] = None

    def text(self) -> str:
        """Return the content with its parts joined."""
        return text_of(self.content)

    def calls(self, path: str) -> tuple[PastCall, ...]:
        """Return the calls it made; `path` is the message's place in the request.

        Raises:
            InvalidRequestError: the arguments of one are not a JSON object.
        """
        if self.function_call is not None:
            # The older form has no ids: its results refer to the function's name.
            call = self.function_call
            return (call.past(call.name, f"{path}.function_call"),)
        return tuple(
            call.function.past(call.id, f"{path}.tool_calls.{at}.function")
            for at, call in enumerate(self.tool_calls or ())
        )

    def check(self, path: str) -> None:
        """Check that it has what its role needs and nothing else; `path` is its place in the request.

        Raises:
            InvalidRequestError: it does not.
        """
        if self.content is None and not (self.tool_calls or self.function_call):
            raise InvalidRequestError(f"Missing required parameter: {path}.content.", param=f"{path}.content")
        for field, role in (("tool_call_id", "tool"), ("name", "function")):
            if (self.role == role) != (getattr(self, field) is not None):
                needed = "is needed in" if self.role == role else "belongs only to"
                raise InvalidRequestError(
                    f"{path}.{field} {needed} a message of role {role}.", param=f"{path}.{field}"
                )
        for field in ("tool_calls", "function_call"):
            if getattr(self, field) and self.role != "assistant":
                raise InvalidRequestError(
                    f"{path}.{field} belongs only to a message of role assistant.", param=f"{path}.{field}"
                )
        if self.tool_calls and self.function_call:
            raise InvalidRequestError(
                f"{path} has both tool_calls and function_call.", param=f"{path}.function_call"
            )
        ids = [call.id for call in self.tool_calls or ()]
        if len(set(ids)) < len(ids):
            raise InvalidRequestError(f"{path}.tool_calls has an id twice.", param=f"{path}.tool_calls")


Messages = Annotated[
    Items[ChatMessage], Field(min_length=1, max_length=MESSAGES_LIMIT), at_most(MESSAGES_LIMIT)
]


class ChatRequest(AnyCompletionRequest, StructuredRequest):
    """A chat completion request. Null means absent everywhere."""

    messages: Messages
    max_completion_tokens: Annotated[
        TokenBound | None, Field(description="counts before max_tokens, where both are given")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Functions | None, _DEPRECATED] = None
    function_call: Annotated[Literal["none", "auto"] | FunctionName | None, _DEPRECATED] = None

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt_asked(self) -> Conversation:
        """Return the conversation and the tools."""
        return conversation(self.messages, self.offer)

    @cached_property
    def offer(self) -> ToolOffer | None:
        """The tools offered to the model, and which of them it has to call.

        Raises:
            InvalidRequestError: the fields about them contradict each other.
        """
        if self.functions and self.tools:
            raise InvalidRequestError("functions is the older form of tools; give one.", param="functions")
        for given, other in (("functions", "tool_choice"), ("tools", "function_call")):
            if getattr(self, given) and getattr(self, other) is not None:
                raise InvalidRequestError(f"{other} is not about {given}.", param=other)
        of_functions = offer_of_functions(self.functions, self.function_call)
        of_tools = offer_of_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
        return of_tools or of_functions

    def grammar_asked(self) -> Grammar | None:
        """Return the grammar of the answer's text; None: it is free.

        Raises:
            InvalidRequestError: several fields define one.
        """
        formatted = self.response_format.grammar("response_format") if self.response_format else None
        return one_grammar(self.structured_outputs, formatted, "response_format")

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return the generation to run."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(asked, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        super().check_combinations()
        _ = self.continued  # refuses what is wrong with it
        if self.offer is not None and call_rules(self.offer) is not None:
            refuse_open_ends(self, "a call that is held to its schema")


def read_chat_request(body: bytes) -> ChatRequest:
    """Decode and check a request body.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    document = without_neutral_messages(without_neutral(read_object(body), NOT_YET))
    request = validate(ChatRequest, without_neutral_options(document))
    request.check_combinations()
    return request


def without_neutral_messages(document: dict[str, Any]) -> dict[str, Any]:
    """Drop fields without effect from the messages of a request.

    Raises:
        InvalidRequestError: a message has a field that is not supported yet.
    """
    messages = document.get("messages")
    if not isinstance(messages, list):
        return document
    return document | {
        "messages": [
            without_neutral(message, MESSAGE_NOT_YET, f"messages.{index}.")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    }


def conversation(messages: Sequence[ChatMessage], offer: ToolOffer | None) -> Conversation:
    """Return a request's `messages` as a conversation in which the tools of `offer` may be called.

    Raises:
        InvalidRequestError: a message lacks a field that its role needs, or has one of another role.
    """
    for at, message in enumerate(messages):
        message.check(f"messages.{at}")
    return Conversation(
        tuple(_message(message, f"messages.{at}") for at, message in enumerate(messages)), offer
    )


def _message(message: ChatMessage, path: str) -> Message:
    role = _ROLES.get(message.role, message.role)
    return Message(
        role=cast("MessageRole", role),
        content=message.text(),
        calls=message.calls(path),
        answers=message.name if message.role == "function" else message.tool_call_id,
        field=path,
    )
