"""`POST /v1/chat/completions`: the request as OpenAI defines it, with vLLM's spelling of what it adds.

Source of names, ranges and defaults: OpenAI's API reference; extensions: vLLM's sampling parameters.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import Generation, Message, MessageRole
from gateway.openai.document import read_object, validate, without_neutral

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        "audio": None,
        "chat_template_kwargs": None,
        "frequency_penalty": 0,
        "function_call": "none",
        "functions": [],
        "min_p": 0,
        "modalities": ["text"],
        "moderation": None,
        "n": 1,
        "parallel_tool_calls": None,
        "prediction": None,
        "presence_penalty": 0,
        "priority": 0,
        "prompt_cache_options": None,
        "prompt_cache_retention": None,
        "reasoning_effort": None,
        "repetition_penalty": 1,
        "response_format": {"type": "text"},
        "return_token_ids": False,
        "skip_special_tokens": True,
        "store": False,
        "structured_outputs": None,
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

STREAM_OPTIONS_NOT_YET: Mapping[str, Any] = MappingProxyType({"include_obfuscation": False})

_INT64 = 2**63


def _token_id(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):  # noqa: PLR2004 - ids are below 2**32
        raise PydanticCustomError("token_id", "the keys are token ids, decimal numbers")
    if text != str(int(text)):
        # "05" beside "5" would be the same id twice, and one of the two ignored.
        raise PydanticCustomError("token_id", "the keys are token ids, without zeros in front")
    return text


def _few_stops(stop: str | list[str]) -> str | list[str]:
    if isinstance(stop, list) and len(stop) > 4:  # noqa: PLR2004 - OpenAI's limit
        raise PydanticCustomError("too_many_stops", "at most 4 stop strings are allowed")
    return stop


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""Read up to its first fault: a body has room for millions, and only one is told."""


def _at_most(limit: int) -> BeforeValidator:
    """Refuse a larger object before its items are looked at: a body has room for hundreds of thousands."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_many", f"at most {limit} entries are allowed")
        return value

    return BeforeValidator(check)


NonEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(_Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message; `developer` is another name for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart]
    tool_call_id: str | None = None

    def text(self) -> str:
        """Return the content with its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(_Strict):
    """What a stream says of token counts."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _included(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("usage", "continuous_usage_stats needs include_usage=true")
        return self


class ChatRequest(_Strict):
    """A chat completion request. Null means absent everywhere."""

    model: NonEmpty
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[NonEmpty | Items[NonEmpty], AfterValidator(_few_stops)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, _at_most(1024)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, lt=_INT64, description="-1 and 0 keep every token")] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[Annotated[int, Field(ge=0, lt=2**32)]] | None = None

    user: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None
    safety_identifier: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None
    prompt_cache_key: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None
    metadata: Annotated[
        dict[str, str] | None, _at_most(16), Field(description="bookkeeping: accepted, not used")
    ] = None
    service_tier: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None

    @property
    def token_bound(self) -> int | None:
        """The bound on new tokens that the client gave."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return what is asked of the upstream."""
        return Generation(
            request_id=request_id,
            model=self.model,
            messages=tuple(_message(message) for message in self.messages),
            deadline=deadline,
            max_tokens=self.token_bound,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=max(self.top_k or 0, 0),
            seed=self.seed,
            stop=()
            if self.stop is None
            else (self.stop,)
            if isinstance(self.stop, str)
            else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stream=bool(self.stream),
        )


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
    options = document.get("stream_options")
    if isinstance(options, dict):
        document["stream_options"] = without_neutral(options, STREAM_OPTIONS_NOT_YET, "stream_options.")
    request = validate(ChatRequest, document)
    _check_combinations(request)
    return request


def _check_combinations(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    bound = request.token_bound
    if bound is not None and (request.min_tokens or 0) > bound:
        raise InvalidRequestError(
            f"min_tokens is more than the bound of {bound} new tokens.", param="min_tokens"
        )
    for index, message in enumerate(request.messages):
        if (message.role == "tool") != (message.tool_call_id is not None):
            path = f"messages.{index}.tool_call_id"
            needed = "is needed in" if message.role == "tool" else "belongs only to"
            raise InvalidRequestError(f"{path} {needed} a message of role tool.", param=path)


def _message(message: ChatMessage) -> Message:
    role: MessageRole = "system" if message.role == "developer" else message.role
    return Message(role=role, content=message.text())
