"""`POST /v1/responses`: the request as OpenAI defines it, for a server that stores no responses."""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Generation, Grammar, Message, NamedTool, ToolOffer
from gateway.openai import generation_request
from gateway.openai.document import Reading, read_object, validate, without_neutral
from gateway.openai.generation_request import (
    MESSAGES_LIMIT,
    Items,
    Strict,
    TokenBound,
    at_most,
)
from gateway.openai.responses_items import Item, ReasoningItem, messages_of
from gateway.openai.schema import Schema
from gateway.openai.structured import (
    BY_TYPE,
    JsonObjectFormat,
    JsonSchema,
    StructuredRequest,
    TextFormat,
    schema_grammar,
)
from gateway.openai.tools import Function, ToolName, offer_of
from wire.limits import TOOLS_LIMIT, TOP_LOGPROBS_LIMIT

UNSUPPORTED: Mapping[str, Any] = MappingProxyType({**generation_request.UNSUPPORTED, "prompt": None})
"""Parameters that would change the answer and are not supported, each with the value that has no effect."""

STORED: Mapping[str, Any] = MappingProxyType(
    {"background": False, "conversation": None, "previous_response_id": None}
)
"""The same for parameters that need stored responses."""

_LOGPROBS = "message.output_text.logprobs"


def _function(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise PydanticCustomError("tool_type", "only tools of the type function are supported")
    return tool


class FlatFunctionTool(Function):
    """A function among `tools`."""

    place: ClassVar[str] = "tools"

    type: Literal["function"]


class FlatNamedChoice(Strict):
    """The choice of one particular tool."""

    place: ClassVar[str] = "tool_choice"

    type: Literal["function"]
    name: ToolName


class FlatJsonSchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    place: ClassVar[str] = "text.format"

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

    place: ClassVar[str] = "text"

    format: FlatFormat | None = None


class Reasoning(Strict):
    """Reasoning options: advice, which no model here takes."""

    place: ClassVar[str] = "reasoning"


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
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Field(description="auto is ignored: nothing is left out")
    ] = None
    include: Annotated[Items[str], Field(max_length=64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_output_tokens

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer reports log-probabilities."""
        return _LOGPROBS in (self.include or ())

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
        return self.one_grammar(text.grammar("text.format") if text else None, "text.format")

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return the generation to run."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(asked, logprobs=(self.top_logprobs or 0) if self.includes_logprobs else None)

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        if self.top_logprobs and not self.includes_logprobs:
            raise InvalidRequestError(
                'top_logprobs needs "message.output_text.logprobs" in include.', param="top_logprobs"
            )
        super().check_combinations()
        _ = self.continued  # refuses what is wrong with it


def read_responses_request(body: bytes, reading: Reading | None = None) -> ResponsesRequest:
    """Decode and check a request body; `reading` notes what of it is ignored, by default nothing is.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    document = without_neutral(read_object(body), UNSUPPORTED)
    document = without_neutral(
        document,
        STORED,
        refusal="needs a server that keeps responses, which this one does not: "
        "send the whole conversation in input",
    )
    request = validate(ResponsesRequest, document, reading)
    _note_ignored(request, reading or Reading(strict=True))
    request.check_combinations()
    return request


def _note_ignored(request: ResponsesRequest, reading: Reading) -> None:
    """Note values of known fields that have no effect here.

    Raises:
        InvalidRequestError: `reading` is strict.
    """
    items = () if isinstance(request.input, str) else request.input
    found = [("input", f"input.{at}") for at, item in enumerate(items) if isinstance(item, ReasoningItem)]
    found += [("truncation", "truncation")] if request.truncation == "auto" else []
    found += [
        ("include", f"include.{at}") for at, each in enumerate(request.include or ()) if each != _LOGPROBS
    ]
    for name, path in found:
        if reading.strict:
            raise InvalidRequestError(f"{path} has no effect on this server.", param=path)
        reading.ignore(f"{name}.reasoning" if name == "input" else name)
