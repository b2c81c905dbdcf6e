"""Tools as they are offered to a model, and how `tool_choice` is enforced.

A choice is enforced by the first line of the answer, which becomes part of the prompt: the name of the tool
that must be called, or an empty line if the answer must be text. A grammar enforces what follows, and the
name if there are several (`wire.grammar.ToolCalls`).
"""

from typing import Any

from gateway.generation import Grammar, NamedTool, ToolOffer
from wire import grammar as wire_grammar
from wire.grammar import CallableTool, ToolCalls

_NO_PARAMETERS = {"type": "object", "properties": {}}


def documents(offer: ToolOffer) -> list[dict[str, Any]]:
    """Return the tools as they appear in the prompt."""
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
    """Return the grammar of the answer's calls; None: there is none.

    Required calls have one. If a tool is strict or the text has a grammar, so do all possible calls.

    Args:
        offer: the tools.
        grammar: of the answer's text, if it calls no tool.
    """
    if offer.choice == "none":
        return None
    if offer.choice == "auto" and grammar is None and not any(tool.strict for tool in offer.tools):
        return None
    if offer.choice != "auto":
        grammar = None  # The answer is calls only.
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
    """Return the names of the tools after whose call the answer ends."""
    return callable_names(offer) if offer.single or isinstance(offer.choice, NamedTool) else []
