"""`/v1/responses`, and the count of its input: requests and items, as OpenAI has them, with nothing stored.

Several adjacent items can form one message of the conversation: an assistant's text and its calls. Ids and
states of items are bookkeeping, since nothing is stored that they could refer to.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.request import (
    AllowedTools,
    Conversation,
    Draft,
    Grammar,
    Message,
    MessageRole,
    NamedTool,
    ToolOffer,
)
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import REASONED, Effort, RefusalPart, Switches
from gateway.openai.document import (
    Content,
    Items,
    Reading,
    Result,
    Strict,
    Unread,
    at_most,
    by_type,
    fault,
    if_read,
    ignore,
    lines_of,
    text_of,
    type_of,
)
from gateway.openai.images import Illustrated, InputImagePart, images_of
from gateway.openai.params import BOOKKEEPING, MESSAGES_LIMIT, GenerationRequest, TokenBound
from gateway.openai.structured import (
    BY_TYPE,
    JsonSchema,
    PlainFormat,
    Schema,
    StructuredRequest,
    format_grammar,
)
from gateway.openai.tokenize import CountingRequest
from gateway.openai.tools import BY_CHOICE, CallId, ChoiceMode, Function, FunctionCall, ToolName, offer_of
from wire.limits import TOOLS_LIMIT, TOP_LOGPROBS_LIMIT

_LOGPROBS = "message.output_text.logprobs"


class InputTextPart(Strict, place="input.content"):
    """A part of a message's content, or of a result."""

    type: Literal["input_text"]
    text: str


class OutputTextPart(Strict, place="input.content"):
    """A part of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Unread, Field(description="bookkeeping: of the answer that is sent back")] = None
    logprobs: Annotated[Unread, Field(description="bookkeeping: of the answer that is sent back")] = None


class OutputRefusalPart(RefusalPart, place="input.content"):
    """A part of an earlier answer that refused."""


def _kind_of(value: Any) -> str | None:
    """Return the item's type, which messages may leave out."""
    return type_of(value) or ("message" if isinstance(value, dict) and value.get("type") is None else None)


Part = Annotated[
    Annotated[InputTextPart, Tag("input_text")]
    | Annotated[OutputTextPart, Tag("output_text")]
    | Annotated[OutputRefusalPart, Tag("refusal")]
    | Annotated[InputImagePart, Tag("input_image")],
    by_type(
        "only parts of the types input_text, output_text, refusal and input_image are supported", type_of
    ),
]


class _AnyItem(Strict, place="input"):
    id: Annotated[str | None, BOOKKEEPING] = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, BOOKKEEPING] = None


class MessageItem(_AnyItem):
    """One message; `developer` is another name for `system`."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Illustrated[Part]

    @model_validator(mode="after")
    def _of_users(self) -> Self:
        if self.role != "user" and images_of(self.content):
            raise fault("content", "images belong only to a message of role user")
        return self


class FunctionCallItem(_AnyItem, FunctionCall):
    """A call that the model made. Its result refers to `call_id`."""

    type: Literal["function_call"]
    call_id: CallId


class FunctionResultItem(_AnyItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Result[InputTextPart]


class ReasoningPart(Strict, place="input.content"):
    """A part of it."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_AnyItem):
    """What a model thought before an earlier answer: for one whose chat template reads it, else ignored."""

    type: Literal["reasoning"]
    summary: Unread = None
    content: Content[ReasoningPart] | None = None
    encrypted_content: Unread = None

    @model_validator(mode="after")
    def _ignored(self, info: ValidationInfo) -> Self:
        if not self.content or Reading.of(info).reads.isdisjoint(REASONED):
            ignore(info, "input.reasoning")
            return self.model_copy(update={"content": None})
        return self


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    by_type(
        "only items of the types message, function_call, function_call_output and reasoning are supported, "
        "as they came: references need a server that keeps responses "
        "(many clients send whole items with store=False)",
        _kind_of,
    ),
]


def messages_of(items: Iterable[Item], instructions: str | None = None) -> list[Message]:
    """Return `items` as a conversation that begins with `instructions`.

    Messages of one role in a row are one, the instructions the system's: many chat templates refuse a second
    one, or leave it out. An assistant's has its reasoning and calls, too, up to their results. Blank lines
    separate messages, and the text before a call from that after it.

    Raises:
        InvalidRequestError: the id of a call is used twice.
    """
    drafts: list[Draft] = []
    if instructions is not None:
        _draft_of(drafts, "system", "instructions").add(instructions)
    for at, item in enumerate(items):
        path = f"input.{at}"
        if isinstance(item, ReasoningItem):
            if item.content:
                _draft_of(drafts, "assistant", path).reasoning.append(text_of(item.content))
        elif isinstance(item, FunctionResultItem):
            drafts.append(Draft("tool", path, answers=item.call_id))
            drafts[-1].add(lines_of(item.output))
        elif isinstance(item, FunctionCallItem):
            _draft_of(drafts, "assistant", path).add_call(item.past(item.call_id), f"{path}.call_id")
        else:
            draft = _draft_of(drafts, "system" if item.role == "developer" else item.role, path)
            if not draft.calls:  # what is between two of them is one part
                draft.begin()
            draft.add(text_of(item.content), images_of(item.content, f"{path}.content"))
    return [draft.message() for draft in drafts]


def _draft_of(drafts: list[Draft], role: MessageRole, path: str) -> Draft:
    """Return the last draft if it is this role's, else a new one behind it."""
    if not drafts or drafts[-1].role != role:
        drafts.append(Draft(role, path))
    return drafts[-1]


def _function(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise PydanticCustomError("tool_type", "only tools of the type function are supported")
    return tool


class FlatFunctionTool(Function, place="tools"):
    """A function among `tools`."""

    type: Literal["function"]


class FlatNamedChoice(Strict, place="tool_choice"):
    """The choice of one particular tool."""

    type: Literal["function"]
    name: ToolName

    @property
    def chosen(self) -> NamedTool:
        """The choice in our own words."""
        return NamedTool(self.name)


class FlatAllowedChoice(Strict, place="tool_choice"):
    """The choice of some of the tools: others are not offered to the model."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[FlatNamedChoice], Field(min_length=1, max_length=TOOLS_LIMIT)]

    @property
    def chosen(self) -> AllowedTools:
        """The choice in our own words."""
        return AllowedTools(frozenset(tool.name for tool in self.tools), self.mode)


FlatChoice = Annotated[
    Annotated[ChoiceMode, Tag("a mode")]
    | Annotated[FlatNamedChoice, Tag("a function")]
    | Annotated[FlatAllowedChoice, Tag("a allowed_tools")],
    BY_CHOICE,
]


class FlatJsonSchemaFormat(JsonSchema, place="text.format"):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class TextConfig(Strict, place="text"):
    """The format of the text."""

    defaults: ClassVar[Mapping[str, Any]] = {"verbosity": "medium"}

    format: (
        Annotated[
            Annotated[PlainFormat, Tag("<plain>")] | Annotated[FlatJsonSchemaFormat, Tag("<schema>")],
            BY_TYPE,
        ]
        | None
    ) = None


class ReasoningOptions(Strict, place="reasoning"):
    """Reasoning options."""

    effort: Annotated[Effort, if_read("reasoning.effort", "reasoning_effort")] = None


def _truncation(value: str, info: ValidationInfo) -> str:
    if value == "auto":
        ignore(info, "truncation")
    return value


def _included(value: str, info: ValidationInfo) -> str:
    if value != _LOGPROBS:
        ignore(info, "include")
    return value


Input = Annotated[
    str | Annotated[Items[Item], Field(min_length=1, max_length=MESSAGES_LIMIT)], at_most(MESSAGES_LIMIT)
]

_KEEPS: Final = "needs a server that keeps responses, which this one does not: "
KEPT: Final = _KEEPS + "send the whole conversation in input (as many clients do with store=False)"
"""Why nothing can refer to an earlier response, and what to do instead."""


class _InputRequest(StructuredRequest):
    """What makes a prompt. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {"conversation": None, "previous_response_id": None}
    refusals: ClassVar[Mapping[str, str]] = dict.fromkeys(("conversation", "previous_response_id"), KEPT)

    subject: ClassVar[str] = "input"

    input: Input | None = None
    instructions: Annotated[str | None, Field(description="a system message before all others")] = None
    tools: (
        Annotated[
            Items[Annotated[FlatFunctionTool, BeforeValidator(_function)]], Field(max_length=TOOLS_LIMIT)
        ]
        | None
    ) = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Switches = None
    truncation: Annotated[
        Annotated[Literal["auto", "disabled"], AfterValidator(_truncation)] | None,
        Field(description="auto is ignored: nothing is left out"),
    ] = None

    @cached_property
    def continued(self) -> Conversation:
        """The conversation and the tools."""
        items = () if self.input is None or isinstance(self.input, str) else self.input
        messages = messages_of(items, self.instructions)
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input, field="input"))
        effort = self.reasoning.effort if self.reasoning else None
        switches = {} if effort is None else {"reasoning_effort": effort}
        if not messages:
            raise InvalidRequestError("A conversation needs at least one message.", param="input")
        return Conversation(tuple(messages), self._offer(), switches | (self.chat_template_kwargs or {}))

    def _offer(self) -> ToolOffer | None:
        choice = self.tool_choice
        chosen = choice if choice is None or isinstance(choice, str) else choice.chosen
        single = self.parallel_tool_calls is False
        return offer_of(self.tools or (), chosen, path="tools.{}", single=single)

    @property
    def formatted(self) -> Grammar | None:
        """The grammar that `text.format` asks for."""
        return format_grammar(self.text.format if self.text else None, "text.format")


class ResponsesRequest(_InputRequest, GenerationRequest):
    """A request for a response. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "background": False,
        "function_call": None,
        "functions": None,
        "max_completion_tokens": None,
        "max_tokens": None,
        "messages": None,
        "n": 1,
        "prompt": None,
        "response_format": None,
    }
    refusals: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("function_call", "functions"), "belongs to chat completions: give tools and tool_choice"
        ),
        **dict.fromkeys(("max_completion_tokens", "max_tokens"), "has moved to max_output_tokens here"),
        "background": _KEEPS + "give background=false",
        "messages": "has moved to input here",
        "response_format": "has moved to text.format here",
    }

    input: Input
    max_output_tokens: TokenBound | None = None
    include: Annotated[Items[Annotated[str, AfterValidator(_included)]], Field(max_length=64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_output_tokens

    @property
    def bound_field(self) -> str:
        """The name of the field with that limit."""
        return "max_output_tokens"

    @property
    def logprobs(self) -> int | None:
        """How many alternatives are reported beside each token; None: no log-probabilities are."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given."""
        return super().sampling() | {"logprobs": self.logprobs}

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        if self.top_logprobs and self.logprobs is None:
            raise InvalidRequestError(
                'top_logprobs needs "message.output_text.logprobs" in include.', param="top_logprobs"
            )
        super().check()


class InputTokensRequest(_InputRequest, CountingRequest):
    """A request to count the tokens of a prompt. Null means absent everywhere."""
