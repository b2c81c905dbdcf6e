"""Tools as models are offered them, and what an answer may and has to begin with.

A choice is enforced by the first line of the answer, which becomes part of the prompt: the name of the tool
that has to be called, or an empty line where the answer has to be text.
"""

from typing import Any

from gateway.errors import InvalidRequestError
from gateway.generation import NamedTool, ToolOffer

_NO_PARAMETERS = {"type": "object", "properties": {}}


def documents(offer: ToolOffer) -> list[dict[str, Any]]:
    """Return the tools as they stand in the prompt."""
    return [
        {
            "name": tool.name,
            **({} if tool.description is None else {"description": tool.description}),
            "parameters": dict(tool.parameters) or _NO_PARAMETERS,
        }
        for tool in offer.tools
    ]


def answer_metadata(offer: ToolOffer) -> str | None:
    """Return the first line of the answer; None: the model decides.

    Raises:
        InvalidRequestError: the choice is not one that a first line can enforce.
    """
    if isinstance(offer.choice, NamedTool):
        return offer.choice.name
    if offer.choice == "none":
        return ""
    if offer.choice == "auto":
        return None
    if len(offer.tools) > 1:
        raise InvalidRequestError(
            f'{offer.choice_field} "required" is not supported yet with more than one tool: the answer would '
            "have to be held to their names while it is sampled. Name the tool instead.",
            param=offer.choice_field,
        )
    return offer.tools[0].name


def callable_names(offer: ToolOffer) -> list[str]:
    """Return the names of the tools that the answer may call."""
    if isinstance(offer.choice, NamedTool):
        return [offer.choice.name]
    return [] if offer.choice == "none" else [tool.name for tool in offer.tools]


def last_calls(offer: ToolOffer) -> list[str]:
    """Return the names of tools after whose call the answer ends."""
    return callable_names(offer) if offer.single or isinstance(offer.choice, NamedTool) else []
