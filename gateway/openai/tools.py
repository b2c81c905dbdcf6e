"""Tools in a chat request (`tools`, and the older `functions`), and calls in its messages."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import from_json

from gateway.chat.calls import JsonEnd
from gateway.core.request import AllowedTools, NamedTool, PastCall, Tool, ToolOffer
from gateway.errors import InvalidRequestError
from gateway.openai.document import Body, Items, Strict, Unread, branch_of
from gateway.openai.structured import Schema, shallow, too_deep
from wire.limits import TOOLS_LIMIT

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}\z")]
"""As long as at Anthropic; OpenAI's have up to 64 characters."""


class Function(Strict, place="tools.function"):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: Annotated[
        bool | None, Field(description="true: every call's arguments obey the schema, or it is refused")
    ] = None

    def tool(self, place: int) -> Tool:
        """Return it, the request's tool at `place`, as one to be offered to the model."""
        return Tool(
            place=place,
            name=self.name,
            description=self.description,
            parameters=self.parameters or {},
            strict=bool(self.strict),
        )


class FunctionTool(Strict, place="tools"):
    """A function among `tools`."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Strict, place="tool_choice.function"):
    """The name of the function that must be called."""

    name: ToolName


class NamedChoice(Strict, place="tool_choice"):
    """The choice of one particular tool."""

    type: Literal["function"] = "function"
    function: FunctionName

    @property
    def chosen(self) -> NamedTool:
        """The choice in our own words."""
        return NamedTool(self.function.name)


class AllowedFunctions(Strict, place="tool_choice.allowed_tools"):
    """The tools that may be called: others are not offered to the model."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedChoice], Field(min_length=1, max_length=TOOLS_LIMIT)]


class AllowedChoice(Strict, place="tool_choice"):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    @property
    def chosen(self) -> AllowedTools:
        """The choice in our own words."""
        allowed = self.allowed_tools
        return AllowedTools(frozenset(tool.function.name for tool in allowed.tools), allowed.mode)


ChoiceMode = Literal["none", "auto", "required"]


def _kind_of_choice(choice: Any) -> str:
    if not isinstance(choice, dict):
        return "a mode"
    return branch_of(choice) if "type" in choice else "a function"


BY_CHOICE: Final = Discriminator(
    _kind_of_choice,
    custom_error_type="choice_type",
    custom_error_message="only choices of the types function and allowed_tools are supported",
)
"""Selects how tools are chosen: by a mode, or by the type of an object."""

Choice = Annotated[
    Annotated[ChoiceMode, Tag("a mode")]
    | Annotated[NamedChoice, Tag("a function")]
    | Annotated[AllowedChoice, Tag("a allowed_tools")],
    BY_CHOICE,
]


def _as_written(arguments: str) -> str:
    """Return arguments as an object; of those that broke off, what is there. Other text stays as it is.

    A model may write any of these, and an agent sends it back with what became of it.
    """
    try:
        read, written = msgspec.json.decode(arguments or "{}"), arguments or "{}"
    except RecursionError:
        raise too_deep() from None
    except msgspec.DecodeError:
        try:
            escaped, _ = JsonEnd().take(arguments)
            read = from_json(escaped, allow_inf_nan=False, allow_partial="trailing-strings")
            written = json.dumps(read, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except ValueError:  # no JSON, or a number beyond floats, which would be written as another one
            return arguments
    return written if isinstance(shallow(read), dict) else arguments


class FunctionCall(Strict, place="messages.tool_calls.function"):
    """A call that was made; `arguments` is a JSON object, as text, or what the model wrote in its place."""

    name: ToolName
    arguments: Annotated[str, AfterValidator(_as_written)]
    parsed_arguments: Annotated[
        Unread, Field(description="bookkeeping: the SDK sends along what it made of `arguments`")
    ] = None

    def past(self, call_id: str) -> PastCall:
        """Return it as part of a conversation; `call_id` is the id that its result refers to."""
        return PastCall(id=call_id, name=self.name, arguments=self.arguments)


CallId = Annotated[str, Field(min_length=1)]


class MessageCall(Strict, place="messages.tool_calls"):
    """A call in an assistant message."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[
        int | None, Field(ge=0, description="bookkeeping: the SDK sends along where a stream had it")
    ] = None


_DEPRECATED = Field(json_schema_extra={"deprecated": True})  # `deprecated=True` would warn at each access

Tools = Annotated[Items[FunctionTool], Field(max_length=TOOLS_LIMIT)]
Functions = Annotated[Items[Function], Field(max_length=TOOLS_LIMIT)]


def offer_of(
    functions: Sequence[Function],
    choice: ChoiceMode | NamedTool | AllowedTools | None,
    *,
    path: str = "tools.{}.function",
    field: str = "tools",
    choice_field: str = "tool_choice",
    single: bool,
) -> ToolOffer | None:
    """Return the offer of `functions`; None: no tools.

    `field` and `choice_field` are the names in the request of the functions and of the choice, `path` that of
    one function, with `{}` for its index. `single`: at most one call in the answer.

    Raises:
        InvalidRequestError: functions and choice contradict each other.
    """
    names = [function.name for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidRequestError(f"There are two tools {name!r}.", param=f"{path.format(at)}.name")
    offered = frozenset(names)
    if isinstance(choice, NamedTool | AllowedTools):
        chosen = {choice.name} if isinstance(choice, NamedTool) else choice.names
        for name in sorted(chosen - offered):
            raise InvalidRequestError(
                f"{choice_field} names {name!r}, which is not among the tools.", param=choice_field
            )
    if isinstance(choice, AllowedTools):
        offered, choice = choice.names, choice.choice
    if not functions:
        if choice == "required":
            raise InvalidRequestError(f"{choice_field} needs {field}.", param=choice_field)
        return None
    return ToolOffer(
        tools=tuple(each.tool(at) for at, each in enumerate(functions) if each.name in offered),
        choice=choice or "auto",
        single=single,
        field=field,
        schema_field=f"{path}.parameters",
        choice_field=choice_field,
    )


class ToolsRequest(Body):
    """A request of a chat that may offer tools, in their newer form or in the older one."""

    tools: Tools | None = None
    tool_choice: Choice | None = None
    functions: Annotated[Functions | None, _DEPRECATED] = None
    function_call: Annotated[Literal["none", "auto"] | FunctionName | None, _DEPRECATED] = None

    def offer(self, *, single: bool) -> ToolOffer | None:
        """Return the tools offered to the model, and which of them it has to call; None: no tools.

        `single`: at most one call in the answer; of functions, there never are several.

        Raises:
            InvalidRequestError: the fields about them contradict each other.
        """
        if self.functions and self.tools:
            raise InvalidRequestError("functions is the older form of tools; give one.", param="functions")
        for given, other in (("functions", "tool_choice"), ("tools", "function_call")):
            if getattr(self, given) and getattr(self, other) not in (None, "auto"):
                raise InvalidRequestError(f"{other} is not about {given}.", param=other)
        older = self.function_call
        of_functions = offer_of(
            self.functions or (),
            NamedTool(older.name) if isinstance(older, FunctionName) else older,
            path="functions.{}",
            field="functions",
            choice_field="function_call",
            single=True,
        )
        choice = self.tool_choice
        chosen = choice if choice is None or isinstance(choice, str) else choice.chosen
        tools = [tool.function for tool in self.tools or ()]
        return offer_of(tools, chosen, single=single) or of_functions
