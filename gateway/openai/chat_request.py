"""`POST /v1/chat/completions`: the request as OpenAI defines it."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Generation, Message, MessageRole
from gateway.openai import generation_request
from gateway.openai.document import read_object, validate, without_neutral
from gateway.openai.generation_request import (
    GenerationRequest,
    Items,
    Strict,
    TokenBound,
    without_neutral_options,
)

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        **generation_request.NOT_YET,
        "audio": None,
        "chat_template_kwargs": None,
        "function_call": "none",
        "functions": [],
        "modalities": ["text"],
        "moderation": None,
        "parallel_tool_calls": None,
        "prediction": None,
        "prompt_cache_options": None,
        "prompt_cache_retention": None,
        "reasoning_effort": None,
        "return_token_ids": False,
        "store": False,
        "tool_choice": "none",
        "tools": [],
        "verbosity": None,
        "web_search_options": None,
    }
)
"""Real parameters that are not supported yet, each with the value that asks for nothing."""

MESSAGE_NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        "annotations": [],
        "audio": None,
        "function_call": None,
        "name": None,
        "reasoning_content": None,
        "refusal": None,
        "tool_calls": [],
    }
)
"""The same for a message. Answers of this server, sent back as they came, carry some of them as null."""


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message; `developer` is another name for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart]
    tool_call_id: str | None = None

    def text(self) -> str:
        """Return the content with its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """A chat completion request. Null means absent everywhere."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenBound | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def token_bound(self) -> int | None:
        """The bound on new tokens that the client gave."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt_asked(self) -> Conversation:
        """Return the conversation."""
        return Conversation(tuple(_message(message) for message in self.messages))

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return what is asked of the upstream."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(asked, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        super().check_combinations()
        for index, message in enumerate(self.messages):
            if (message.role == "tool") != (message.tool_call_id is not None):
                path = f"messages.{index}.tool_call_id"
                needed = "is needed in" if message.role == "tool" else "belongs only to"
                raise InvalidRequestError(f"{path} {needed} a message of role tool.", param=path)


def read_chat_request(body: bytes) -> ChatRequest:
    """Decode and check a request body.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    document = without_neutral(read_object(body), NOT_YET)
    messages = document.get("messages")
    if isinstance(messages, list):
        document["messages"] = [
            without_neutral(message, MESSAGE_NOT_YET, f"messages.{index}.")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    request = validate(ChatRequest, without_neutral_options(document))
    request.check_combinations()
    return request


def _message(message: ChatMessage) -> Message:
    role: MessageRole = "system" if message.role == "developer" else message.role
    return Message(role=role, content=message.text())
