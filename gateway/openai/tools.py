"""Tools in a chat request (`tools`, and the older `functions`), and calls in its messages."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import NamedTool, PastCall, Tool, ToolChoice, ToolOffer
from gateway.openai.content import Unread
from gateway.openai.generation_request import Items, NonEmpty, Strict
from gateway.openai.schema import MAX_DEPTH, Schema, shallow
from wire.limits import TOOLS_LIMIT

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z")]


class Function(Strict):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    place: ClassVar[str] = "tools.function"

    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: Annotated[
        bool | None, Field(description="true: every call's arguments obey the schema, or it is refused")
    ] = None

    def tool(self) -> Tool:
        """Return it as a tool to be offered to the model."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or {},
            strict=bool(self.strict),
        )


class FunctionTool(Strict):
    """A function among `tools`."""

    place: ClassVar[str] = "tools"

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of the function that must be called."""

    place: ClassVar[str] = "tool_choice.function"

    name: ToolName


class NamedChoice(Strict):
    """The choice of one particular tool."""

    place: ClassVar[str] = "tool_choice"

    type: Literal["function"]
    function: FunctionName


class FunctionCall(Strict):
    """A call that was made; `arguments` is a JSON object, as text."""

    place: ClassVar[str] = "messages.tool_calls.function"

    name: ToolName
    arguments: str
    parsed_arguments: Annotated[
        Unread, Field(description="bookkeeping: the SDK sends along what it made of `arguments`")
    ] = None

    def past(self, call_id: str, path: str) -> PastCall:
        """Return it as part of a conversation.

        Args:
            call_id: the id that its result refers to.
            path: of this object in the request.

        Raises:
            InvalidRequestError: the arguments are not a JSON object, or nest too deeply.
        """
        arguments = self.arguments or "{}"
        try:
            decoded = shallow(msgspec.json.decode(arguments))
        except (msgspec.DecodeError, RecursionError, PydanticCustomError, UnicodeEncodeError):
            decoded = None
        if not isinstance(decoded, dict):
            raise InvalidRequestError(
                f"{path}.arguments must be a JSON object, as text, at most {MAX_DEPTH} levels deep.",
                param=f"{path}.arguments",
            )
        return PastCall(id=call_id, name=self.name, arguments=arguments)


class MessageCall(Strict):
    """A call in an assistant message."""

    place: ClassVar[str] = "messages.tool_calls"

    id: NonEmpty
    type: Literal["function"]
    function: FunctionCall
    index: Annotated[
        int | None, Field(ge=0, description="bookkeeping: the SDK sends along where a stream had it")
    ] = None


Tools = Annotated[Items[FunctionTool], Field(max_length=TOOLS_LIMIT)]
Functions = Annotated[Items[Function], Field(max_length=TOOLS_LIMIT)]


def offer_of(
    functions: Sequence[Function], choice: ToolChoice | None, *, path: str, single: bool
) -> ToolOffer | None:
    """Return the offer made by the functions in `tools` and by `tool_choice`; None: no tools.

    Args:
        functions: the ones that may be called.
        choice: which must be called.
        path: of a function in the request, with `{}` for its index.
        single: at most one call in the answer.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    _check(functions, path, choice.name if isinstance(choice, NamedTool) else None, "tool_choice")
    if not functions:
        if choice == "required":
            raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
        return None
    tools = tuple(function.tool() for function in functions)
    return ToolOffer(tools=tools, choice=choice or "auto", single=single, schema_field=f"{path}.parameters")


def offer_of_tools(
    tools: list[FunctionTool] | None,
    choice: Literal["none", "auto", "required"] | NamedChoice | None,
    *,
    parallel: bool | None,
) -> ToolOffer | None:
    """Return the offer made by a chat's `tools`, `tool_choice` and `parallel_tool_calls`; None: no tools.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    if parallel is not None and not tools:
        raise InvalidRequestError("parallel_tool_calls needs tools.", param="parallel_tool_calls")
    functions = [tool.function for tool in tools or ()]
    named = NamedTool(choice.function.name) if isinstance(choice, NamedChoice) else choice
    return offer_of(functions, named, path="tools.{}.function", single=parallel is False)


def offer_of_functions(
    functions: list[Function] | None, choice: Literal["none", "auto"] | FunctionName | None
) -> ToolOffer | None:
    """Return the offer made by `functions` and `function_call`, of at most one call; None: no functions.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    functions = functions or []
    named = choice.name if isinstance(choice, FunctionName) else None
    _check(functions, "functions.{}", named, "function_call")
    if not functions:
        return None
    return ToolOffer(
        tools=tuple(function.tool() for function in functions),
        choice=NamedTool(choice.name) if isinstance(choice, FunctionName) else choice or "auto",
        single=True,
        field="functions",
        schema_field="functions.{}.parameters",
        choice_field="function_call",
    )


def _check(functions: Sequence[Function], path: str, named: str | None, choice_field: str) -> None:
    """Check that the names differ, and that the chosen one is among them."""
    names = [function.name for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidRequestError(f"There are two tools {name!r}.", param=f"{path.format(at)}.name")
    if named is not None and named not in names:
        raise InvalidRequestError(
            f"{choice_field} names {named!r}, which is not among the tools.", param=choice_field
        )
