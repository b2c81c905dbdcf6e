"""`POST /v1/responses`: the request as OpenAI defines it, for a server that stores no responses."""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Generation, Grammar, Message, NamedTool, ToolOffer
from gateway.openai.document import read_object, validate, without_neutral, without_neutral_in
from gateway.openai.generation_request import (
    MESSAGES_LIMIT,
    Items,
    Strict,
    TokenBound,
    at_most,
    without_neutral_options,
)
from gateway.openai.responses_items import ITEM_NOT_YET, Item, messages_of
from gateway.openai.schema import Schema
from gateway.openai.structured import (
    BY_TYPE,
    JsonObjectFormat,
    JsonSchema,
    StructuredRequest,
    TextFormat,
    one_grammar,
    schema_grammar,
)
from gateway.openai.tools import Function, ToolName, offer_of
from wire.limits import TOOLS_LIMIT, TOP_LOGPROBS_LIMIT

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        "access_programs": None,
        "context_management": None,
        "image": None,
        "max_tool_calls": None,
        "moderation": None,
        "prompt": None,
        "prompt_cache_options": None,
        "prompt_cache_retention": None,
        "truncation": "disabled",
    }
)
"""Parameters of the API that are not supported yet, each with the value that has no effect."""

STORED: Mapping[str, Any] = MappingProxyType(
    {"background": False, "conversation": None, "previous_response_id": None, "store": False}
)
"""The same for parameters that need stored responses."""

REASONING_NOT_YET: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("context", "effort", "generate_summary", "mode", "summary"))
)

TEXT_NOT_YET: Mapping[str, Any] = MappingProxyType({"verbosity": None})

TOOL_NOT_YET: Mapping[str, Any] = MappingProxyType(
    {"allowed_callers": None, "async": False, "defer_loading": False, "output_schema": None}
)


def _function(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise PydanticCustomError("tool_type", "only tools of the type function are supported")
    return tool


class FlatFunctionTool(Function):
    """A function among `tools`."""

    type: Literal["function"]


class FlatNamedChoice(Strict):
    """The choice of one particular tool."""

    type: Literal["function"]
    name: ToolName


class FlatJsonSchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]

    def grammar(self, field: str) -> Grammar | None:
        """Return the answer's grammar; `field` is this object's name in the request."""
        return schema_grammar(self.schema_, f"{field}.schema")


FlatFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[FlatJsonSchemaFormat, Tag("<json_schema>")],
    BY_TYPE,
]


class TextConfig(Strict):
    """The format of the text."""

    format: FlatFormat | None = None


class Reasoning(Strict):
    """Reasoning options: none is supported yet."""


class ResponsesRequest(StructuredRequest):
    """A request for a response. Null means absent everywhere."""

    input: Annotated[
        str | Annotated[Items[Item], Field(min_length=1, max_length=MESSAGES_LIMIT)], at_most(MESSAGES_LIMIT)
    ]
    instructions: Annotated[str | None, Field(description="a system message before all others")] = None
    max_output_tokens: TokenBound | None = None
    tools: (
        Annotated[
            Items[Annotated[FlatFunctionTool, BeforeValidator(_function)]], Field(max_length=TOOLS_LIMIT)
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_output_tokens

    def prompt_asked(self) -> Conversation:
        """Return the conversation and the tools."""
        instructions = []
        if self.instructions is not None:
            instructions.append(Message(role="system", content=self.instructions, field="instructions"))
        if isinstance(self.input, str):
            said = [Message(role="user", content=self.input, field="input")]
        else:
            said = messages_of(self.input)
        return Conversation((*instructions, *said), self.offer)

    @cached_property
    def offer(self) -> ToolOffer | None:
        """The tools offered to the model, and which of them it has to call.

        Raises:
            InvalidRequestError: the fields about them contradict each other.
        """
        choice = self.tool_choice
        return offer_of(
            self.tools or (),
            NamedTool(choice.name) if isinstance(choice, FlatNamedChoice) else choice,
            path="tools.{}",
            single=self.parallel_tool_calls is False,
        )

    def grammar_asked(self) -> Grammar | None:
        """Return the grammar of the answer's text; None: it is free.

        Raises:
            InvalidRequestError: several fields define one.
        """
        text = self.text.format if self.text else None
        return one_grammar(
            self.structured_outputs, text.grammar("text.format") if text else None, "text.format"
        )

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return the generation to run."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(asked, logprobs=(self.top_logprobs or 0) if self.include else None)

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        if self.top_logprobs and not self.include:
            raise InvalidRequestError(
                'top_logprobs needs "message.output_text.logprobs" in include.', param="top_logprobs"
            )
        super().check_combinations()
        _ = self.continued  # refuses what is wrong with it


def read_responses_request(body: bytes) -> ResponsesRequest:
    """Decode and check a request body.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    document = without_neutral(read_object(body), NOT_YET)
    document = without_neutral(
        document,
        STORED,
        refusal="needs a server that keeps responses, which this one does not: "
        "send the whole conversation in input",
    )
    document = without_neutral_in(document, "reasoning", REASONING_NOT_YET)
    document = without_neutral_in(document, "text", TEXT_NOT_YET)
    for name, neutral in (("input", ITEM_NOT_YET), ("tools", TOOL_NOT_YET)):
        if isinstance(objects := document.get(name), list):
            document[name] = [
                without_neutral(each, neutral, f"{name}.{at}.") if isinstance(each, dict) else each
                for at, each in enumerate(objects)
            ]
    request = validate(ResponsesRequest, without_neutral_options(document))
    request.check_combinations()
    return request
