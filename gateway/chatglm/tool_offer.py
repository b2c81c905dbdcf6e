"""Tools as models are offered them, and what an answer may and has to begin with.

A choice is enforced by the first line of the answer, which becomes part of the prompt: the name of the tool
that has to be called, or an empty line where the answer has to be text. What follows, and the name where
there are several, a grammar enforces (`wire.grammar.ToolCalls`).
"""

from typing import Any

from gateway.generation import NamedTool, ToolOffer
from wire.grammar import CallableTool, ToolCalls

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
    """Return the first line of the answer; None: the model decides."""
    if isinstance(offer.choice, NamedTool):
        return offer.choice.name
    if offer.choice == "none":
        return ""
    if offer.choice == "auto":
        return None
    return offer.tools[0].name if len(offer.tools) == 1 else None


def call_rules(offer: ToolOffer) -> ToolCalls | None:
    """Return what the answer's calls are held to while they are sampled; None: nothing.

    Calls that have to be made are, and where a tool is strict, all that may be.
    """
    if offer.choice == "none" or not (offer.choice != "auto" or any(tool.strict for tool in offer.tools)):
        return None
    names = callable_names(offer)
    return ToolCalls(
        tools=[
            CallableTool(tool.name, dict(tool.parameters), tool.strict)
            for tool in offer.tools
            if tool.name in names
        ],
        required=offer.choice != "auto",
        single=offer.single or isinstance(offer.choice, NamedTool),
    )


def callable_names(offer: ToolOffer) -> list[str]:
    """Return the names of the tools that the answer may call."""
    if isinstance(offer.choice, NamedTool):
        return [offer.choice.name]
    return [] if offer.choice == "none" else [tool.name for tool in offer.tools]


def last_calls(offer: ToolOffer) -> list[str]:
    """Return the names of tools after whose call the answer ends."""
    return callable_names(offer) if offer.single or isinstance(offer.choice, NamedTool) else []
