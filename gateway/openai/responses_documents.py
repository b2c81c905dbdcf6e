"""A response in OpenAI's format: its items, its token counts, and what it repeats of the request."""

import secrets
from typing import Any, Literal

from msgspec import Struct

from gateway.errors import GatewayError, InvalidRequestError, RateLimitError
from gateway.generation import Usage
from gateway.openai.chat_answer import TokenLogprobContent
from gateway.openai.responses_request import (
    FlatFunctionTool,
    FlatJsonSchemaFormat,
    FlatNamedChoice,
    ResponsesRequest,
    TextConfig,
)
from gateway.openai.structured import JsonObjectFormat

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class OutputText(Struct, frozen=True, kw_only=True):
    """The text of a message. `logprobs` is empty unless the request included them."""

    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprobContent] = []
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An item with text of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """An item with a call. `arguments` is a JSON object as text; its result refers to `call_id`."""

    id: str
    status: ItemStatus
    arguments: str
    call_id: str
    name: str


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """How much of the input was found in the prefix cache. No request asks for writes to it."""

    cache_write_tokens: int = 0
    cached_tokens: int


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """Always zero: these models do not reason separately from their answer."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True, kw_only=True):
    """The error that ended a response that had begun."""

    code: ErrorCode
    message: str


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Why a response ended before it was complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class RepeatedTool(Struct, frozen=True, kw_only=True):
    """A function of the request."""

    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class RepeatedChoice(Struct, frozen=True, kw_only=True):
    """The choice of one function in the request."""

    type: Literal["function"] = "function"
    name: str


class RepeatedTextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """Free text."""


class RepeatedObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class RepeatedSchemaFormat(Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema; it is always enforced."""

    name: str
    description: str | None
    schema: dict[str, Any]
    strict: Literal[True] = True


class RepeatedText(Struct, frozen=True):
    """The format of the text."""

    format: RepeatedTextFormat | RepeatedObjectFormat | RepeatedSchemaFormat


class RepeatedReasoning(Struct, frozen=True, kw_only=True):
    """Reasoning options: none, since these models do not reason separately."""

    effort: None = None
    summary: None = None


class ResponseDocument(Struct, frozen=True, kw_only=True):
    """A response in any state. Parameters that the request left open have the value that was used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: RepeatedReasoning = RepeatedReasoning()
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: RepeatedText
    tool_choice: Literal["none", "auto", "required"] | RepeatedChoice
    tools: list[RepeatedTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


def begun(asked: ResponsesRequest, created_at: int) -> ResponseDocument:
    """Return the initial response to `asked`, created at `created_at`, Unix time in seconds."""
    choice = asked.tool_choice
    return ResponseDocument(
        id=new_id("resp"),
        created_at=created_at,
        status="in_progress",
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        model=asked.model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        prompt_cache_key=asked.prompt_cache_key,
        safety_identifier=asked.safety_identifier,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        text=_repeated_text(asked.text),
        tool_choice=RepeatedChoice(name=choice.name)
        if isinstance(choice, FlatNamedChoice)
        else choice or "auto",
        tools=[_repeated_tool(tool) for tool in asked.tools or ()],
        top_logprobs=asked.top_logprobs or 0,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        user=asked.user,
        metadata=asked.metadata or {},
    )


def new_id(kind: str) -> str:
    """Make a unique id that begins with `kind`."""
    return f"{kind}_{secrets.token_hex(24)}"


def usage_of(counts: Usage) -> ResponseUsage:
    """Write token counts."""
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
    )


def error_of(error: GatewayError) -> ResponseError:
    """Write the error that ended a response, with the closest of OpenAI's codes."""
    code: ErrorCode = "server_error"
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    return ResponseError(code=code, message=error.message)


def _repeated_tool(tool: FlatFunctionTool) -> RepeatedTool:
    return RepeatedTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
    )


def _repeated_text(text: TextConfig | None) -> RepeatedText:
    match text and text.format:
        case FlatJsonSchemaFormat() as asked:
            return RepeatedText(
                RepeatedSchemaFormat(name=asked.name, description=asked.description, schema=asked.schema_)
            )
        case JsonObjectFormat():
            return RepeatedText(RepeatedObjectFormat())
        case _:
            return RepeatedText(RepeatedTextFormat())
