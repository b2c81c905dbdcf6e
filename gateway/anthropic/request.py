"""`/v1/messages` and `/v1/messages/count_tokens`: the requests, as Anthropic defines them.

A message of the API may be several of a conversation: results of tools stand among the blocks of a user's
message. `temperature` and the other parameters of sampling are those of all routes (`gateway.openai.params`),
with the extensions that these have. `cache_control`, `is_error` and what else has no effect is ignored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.anthropic.errors import THREAD
from gateway.core.request import Conversation, Draft, Grammar, Image, Message, NamedTool, PastCall, ToolOffer
from gateway.errors import InvalidRequestError
from gateway.openai.answer import encode
from gateway.openai.chat_request import REASONED, Effort, Switches
from gateway.openai.document import (
    Items,
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
)
from gateway.openai.images import MEDIA_TYPE, Base64, DataUrl
from gateway.openai.params import BOOKKEEPING, MESSAGES_LIMIT, GenerationRequest, StopStrings, TokenBound
from gateway.openai.structured import Schema, StructuredRequest, schema_grammar, shallow
from gateway.openai.tokenize import CountingRequest
from gateway.openai.tools import CallId, ChoiceMode, Function, ToolName, offer_of
from wire.limits import STOPS_LIMIT, TOOLS_LIMIT


class TextInput(Strict, place="messages.content"):
    """A text."""

    type: Literal["text"]
    text: str


_BILLING: Final = "x-anthropic-billing-header"


def _without_billing(text: str, info: ValidationInfo) -> str:
    """Leave out the line that Claude Code begins with: it differs each time, and no prefix would be found."""
    if not text.startswith(f"{_BILLING}:"):
        return text
    ignore(info, f"system.{_BILLING}")
    return text.partition("\n")[2]


SystemString = Annotated[str, AfterValidator(_without_billing)]


class SystemText(TextInput, place="system"):
    """A part of the system message."""

    text: SystemString


class ResultText(TextInput, place="messages.content.content"):
    """A part of a tool's result."""


class Base64Source(Strict, place="messages.content.source"):
    """An image in the request itself."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=f"^{MEDIA_TYPE}$")]
    data: Base64

    @property
    def url(self) -> str:
        """The image as a data: URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict, place="messages.content.source"):
    """An image in a data: URL; none is fetched."""

    type: Literal["url"]
    url: DataUrl


class ImageInput(Strict, place="messages.content"):
    """An image, for models that see."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("a base64")] | Annotated[UrlSource, Tag("a url")],
        by_type("only sources of the types base64 and url are supported"),
    ]


def _as_json(value: Any) -> str:
    if not isinstance(value, dict):
        raise PydanticCustomError("object", "an object is needed")
    return encode(shallow(value)).decode()


class ToolUseInput(Strict, place="messages.content"):
    """A call that the model made. Its result refers to `id`."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: Annotated[str, BeforeValidator(_as_json), WithJsonSchema({"type": "object"})]


class ToolResultInput(Strict, place="messages.content"):
    """The result of a call: text."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Result[ResultText] | None = None


class ThinkingInput(Strict, place="messages.content"):
    """What a model thought before an earlier answer: for one whose chat template reads it, else ignored."""

    type: Literal["thinking"]
    thinking: Annotated[str | None, if_read("messages.content.thinking", *REASONED)]
    signature: Annotated[Unread, BOOKKEEPING] = None


class RedactedThinkingInput(Strict, place="messages.content"):
    """What nobody but its author can read: ignored."""

    type: Literal["redacted_thinking"]
    data: Unread = None

    @model_validator(mode="after")
    def _ignored(self, info: ValidationInfo) -> Self:
        ignore(info, "messages.content.redacted_thinking")
        return self


Block = Annotated[
    Annotated[TextInput, Tag("a text")]
    | Annotated[ImageInput, Tag("a image")]
    | Annotated[ToolUseInput, Tag("a tool_use")]
    | Annotated[ToolResultInput, Tag("a tool_result")]
    | Annotated[ThinkingInput, Tag("a thinking")]
    | Annotated[RedactedThinkingInput, Tag("a redacted_thinking")],
    by_type(
        "only blocks of the types text, image, tool_use, tool_result, thinking and redacted_thinking are "
        "supported"
    ),
]

_BLOCKS: Final[Mapping[str, tuple[type[Strict], ...]]] = {
    "system": (TextInput,),
    "user": (TextInput, ImageInput, ToolResultInput),
    "assistant": (TextInput, ToolUseInput, ThinkingInput, RedactedThinkingInput),
}
"""Those that a message of a role may have."""


class MessageInput(Strict, place="messages"):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for block in self.blocks:
            if not isinstance(block, _BLOCKS[self.role]):
                raise fault("content", f"a message of role {self.role} has no {block.type} blocks")
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """The content; a text is a block, and so is none."""
        content = self.content or ""
        return [TextInput.model_construct(text=content)] if isinstance(content, str) else content


def _turns(messages: Sequence[MessageInput]) -> Iterator[Message]:
    """Return the messages of a conversation; as at Anthropic, those of one role in a row are one.

    Results of tools are each in a message of its own. Blank lines separate what `messages` say, and what is
    before and after a call.
    """
    for role, run in groupby(enumerate(messages), lambda item: item[1].role):
        draft: Draft | None = None
        for at, said in run:
            if draft is not None:
                draft.begin()
            for place, block in enumerate(said.blocks):
                path = f"messages.{at}.content.{place}"
                if isinstance(block, ToolResultInput):
                    if draft is not None:
                        yield draft.message()
                        draft = None
                    content = lines_of(block.content or "")
                    yield Message(role="tool", content=content, answers=block.tool_use_id, field=path)
                    continue
                draft = draft or Draft(role, f"messages.{at}")
                _add(draft, block, path)
        if draft is not None:
            yield draft.message()


def _add(draft: Draft, block: Block, path: str) -> None:
    match block:
        case TextInput(text=text):
            draft.add(text)
        case ImageInput():
            draft.add("", [Image(url=block.source.url, at=0, field=path)])
        case ToolUseInput():
            call = PastCall(id=block.id, name=block.name, arguments=block.input)
            draft.add_call(call, f"{path}.id")
        case ThinkingInput():
            draft.reasoning.append(block.thinking or "")


def _custom(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        raise PydanticCustomError("tool_type", "only tools of the type custom are supported")
    return tool


class CustomTool(Function, place="tools"):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    parameters: Annotated[Schema, Field(alias="input_schema", description="the JSON schema of its arguments")]


class ToolChoiceInput(Strict, place="tool_choice"):
    """Which tool must be called, and whether several calls may be."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise fault("name", "it is needed", "missing")
        if self.type != "tool" and self.name is not None:
            raise fault("name", "it belongs to the type tool alone")
        return self

    @property
    def chosen(self) -> ChoiceMode | NamedTool:
        """The choice in our own words."""
        match self.type:
            case "any":
                return "required"
            case "tool":
                return NamedTool(self.name or "")
            case mode:
                return mode


class ThinkingOptions(Strict, place="thinking"):
    """Whether the model shall think before it answers, for one whose template reads `enable_thinking`."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(Strict, place="output_config.format"):
    """JSON that obeys a schema, which is enforced."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Strict, place="output_config"):
    """How the answer shall be."""

    effort: Annotated[Effort, if_read("output_config.effort", "reasoning_effort")] = None
    format: OutputFormat | None = None


class ConversationRequest(StructuredRequest):
    """What makes a prompt. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {"container": None, "mcp_servers": [], "output_format": None}
    refusals: ClassVar[dict[str, str]] = {"output_format": "is an older name: give output_config.format"}

    messages: Annotated[
        Items[MessageInput], Field(min_length=1, max_length=MESSAGES_LIMIT), at_most(MESSAGES_LIMIT)
    ]
    system: Annotated[
        Annotated[SystemString | Items[SystemText], AfterValidator(text_of)] | None,
        Field(description="a system message before all others"),
    ] = None
    tools: (
        Annotated[Items[Annotated[CustomTool, BeforeValidator(_custom)]], Field(max_length=TOOLS_LIMIT)]
        | None
    ) = None
    tool_choice: ToolChoiceInput | None = None
    thinking: Annotated[ThinkingOptions | None, if_read("thinking", "enable_thinking")] = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Switches = None

    @cached_property
    def continued(self) -> Conversation:
        """The conversation and the tools."""
        said = list(_turns(self.messages))
        if self.system:
            said.insert(0, Message(role="system", content=text_of(self.system), field="system"))
        switches: dict[str, Any] = {}
        if self.thinking is not None:
            switches["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config and self.output_config.effort:
            switches["reasoning_effort"] = self.output_config.effort
        return Conversation(tuple(said), self._offer(), switches | (self.chat_template_kwargs or {}))

    def _offer(self) -> ToolOffer | None:
        choice = self.tool_choice
        single = bool(choice and choice.disable_parallel_tool_use)
        offer = offer_of(self.tools or (), choice.chosen if choice else None, path="tools.{}", single=single)
        return None if offer is None else replace(offer, schema_field="tools.{}.input_schema")

    @property
    def formatted(self) -> Grammar | None:
        """The grammar that `output_config.format` asks for."""
        form = self.output_config.format if self.output_config else None
        return None if form is None else schema_grammar(form.schema_, "output_config.format.schema")


class MessagesRequest(ConversationRequest, GenerationRequest):
    """A request for a message. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {"compaction": None, "n": 1, THREAD: None}
    refusals: ClassVar[dict[str, str]] = {
        "compaction": "asks for a summary in place of an answer, which this server does not make",
        THREAD: "needs a server that keeps conversations, which this one does not: "
        "send the whole conversation in messages",
    }

    max_tokens: TokenBound
    stop_sequences: StopStrings | None = None
    metadata: Annotated[Unread, BOOKKEEPING] = None

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_tokens

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given; `stop` is an extension, and adds to Anthropic's."""
        given = super().sampling()
        return given | {"stop": [*given.get("stop", ()), *(self.stop_sequences or ())]}

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        super().check()
        if len(self.sampling()["stop"]) > STOPS_LIMIT:
            message = f"stop_sequences and stop have more than {STOPS_LIMIT} strings together."
            raise InvalidRequestError(message, param="stop_sequences")
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            raise InvalidRequestError(
                "The last message is the assistant's: this server begins a new answer and continues none.",
                param=f"messages.{last}",
            )


class CountTokensRequest(ConversationRequest, CountingRequest):
    """A request to count the tokens of a prompt. Null means absent everywhere."""

    subject: ClassVar[str] = "messages"
    """The name of the field to be tokenized."""
