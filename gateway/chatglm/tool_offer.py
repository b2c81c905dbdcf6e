"""Tools as models are offered them, and what an answer may and has to begin with.

A choice is enforced by the first line of the answer, which becomes part of the prompt: the name of the tool
that has to be called, or an empty line where the answer has to be text. What follows, and the name where
there are several, a grammar enforces (`wire.grammar.ToolCalls`).
"""

from typing import Any

from gateway.generation import Grammar, NamedTool, ToolOffer
from wire import grammar as wire_grammar
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


def call_rules(offer: ToolOffer, grammar: Grammar | None = None) -> ToolCalls | None:
    """Return what the answer's calls are held to while they are sampled; None: nothing.

    Calls that have to be made are, and where a tool is strict or text has a grammar, all that may be.

    Args:
        offer: the tools.
        grammar: what the answer's text is held to, where it calls none of them.
    """
    if offer.choice == "none":
        return None
    if offer.choice == "auto" and grammar is None and not any(tool.strict for tool in offer.tools):
        return None
    if offer.choice != "auto":
        grammar = None  # The answer is calls alone.
    names = callable_names(offer)
    return ToolCalls(
        tools=[
            CallableTool(tool.name, dict(tool.parameters), tool.strict)
            for tool in offer.tools
            if tool.name in names
        ],
        required=offer.choice != "auto",
        single=offer.single or isinstance(offer.choice, NamedTool),
        text=wire_grammar.Grammar(grammar.kind, grammar.text) if grammar is not None else None,
    )


def callable_names(offer: ToolOffer) -> list[str]:
    """Return the names of the tools that the answer may call."""
    if isinstance(offer.choice, NamedTool):
        return [offer.choice.name]
    return [] if offer.choice == "none" else [tool.name for tool in offer.tools]


def last_calls(offer: ToolOffer) -> list[str]:
    """Return the names of tools after whose call the answer ends."""
    return callable_names(offer) if offer.single or isinstance(offer.choice, NamedTool) else []
