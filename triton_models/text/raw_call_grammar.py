"""Grammars for answers of text and tool calls to raw prompts, in the notations of other models' templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from triton_models.errors import InvalidGrammarError
from triton_models.text.call_grammar import check_tools, json_arguments, strict_schemas
from triton_models.text.grammar_text import (
    ANYTHING,
    BLANKS,
    Document,
    TextRule,
    Thought,
    escaped,
    literal,
    read,
    text_rule,
)
from wire.grammar import Grammar, Reasoning, ToolCalls, decode_tool_calls

_OBJECT_BEGUN: Final = r'/\s*\{\s*"(name|type|id|parameters|arguments)"(?s:.*)/'
"""The regular expression of text that begins as an object of a call: the gateway takes it for one."""

_BLANK: Final = BLANKS.strip("/")


def raw_call_document(grammar: Grammar, special_ids: Mapping[str, int]) -> Document:
    """Return the document to compile for a grammar of kind `tool_calls` of an answer without a chat format.

    See `ToolCalls` for where calls stand: within marks, behind a token, at the beginning, or in a list.

    Args:
        grammar: in the wire's form.
        special_ids: the ids of special tokens.

    Raises:
        InvalidGrammarError: the grammar is broken or cannot be enforced, or calls cannot be told from text.
    """
    calls = read(decode_tool_calls, grammar.text, "rule of calls")
    tokens = [mark for mark in (calls.opening, calls.between) if mark is not None]
    behind = calls.opening is not None and special_ids.keys() >= {*tokens} and grammar.reasoning is None
    first = calls.bare is not None and calls.text is None
    if not (calls.marks or behind or first or (calls.required and not tokens)):
        raise InvalidGrammarError("calls cannot be told from text: the model's format has none here")
    check_tools(calls)
    bodies = [json_arguments(tool, f"t{at}")[0] for at, tool in enumerate(calls.tools)]
    if calls.opening is not None:
        return _behind_token(calls, bodies, [special_ids[mark] for mark in tokens])
    if calls.bare is not None:
        return _at_the_beginning(calls, bodies, grammar.reasoning)

    thought, heads = Thought.of(grammar.reasoning), _heads(calls, "arguments")
    rules = thought.rules + _objects(heads, bodies)
    if calls.marks is None:
        more = "" if calls.single else f'("," {BLANKS} object)*'
        start = f'start: {thought.body}"[" object {more} "]"\n'
        openings = [f"{before}[{head}" for before in thought.openings for head in heads]
        return Document(start + rules, None, openings, strict_schemas(calls))
    return _within_marks(calls, calls.marks, rules, heads, grammar.reasoning)


def _heads(calls: ToolCalls, key: str) -> list[str]:
    """Return how an object of each tool's calls begins."""
    return [f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ' for tool in calls.tools]


def _objects(heads: Sequence[str], bodies: Sequence[str]) -> str:
    """Return the rules for an object of a call, which begins with one of `heads`."""
    rules = "".join(
        f'object{at}: {literal(head)} {body} "}}"\n'
        for at, (head, body) in enumerate(zip(heads, bodies, strict=True))
    )
    return f"{rules}object: {' | '.join(f'object{at}' for at in range(len(heads)))}\n"


def _within_marks(
    calls: ToolCalls, marks: tuple[str, str], rules: str, heads: Sequence[str], reasoning: Reasoning | None
) -> Document:
    """Return the document for objects within marks of text, among text or alone."""
    thought, (begin, end) = Thought.of(reasoning), marks
    rules += f"body: {BLANKS} object {BLANKS} {literal(end)}\ncall: {literal(begin)} body\n"
    rules += "calls: call" + ("" if calls.single else f" ({BLANKS} call)*") + "\n"
    openings = [f"{before}{begin}{head}" for before in thought.openings for head in heads]
    answer = TextRule("") if calls.text is None else text_rule(calls.text)
    if calls.required:
        start = f"start: {thought.body}calls\n"
    elif calls.text is not None:
        start = f"start: {thought.body}(calls | {answer.body})\n{answer.rules}"
        openings += thought.openings
    else:
        start, more_rules = _among_text(calls, begin, reasoning)
        rules += more_rules
    schemas = [*strict_schemas(calls), ("$", answer.schema)]
    return Document(start + rules, answer.nested, openings, schemas)


def _behind_token(calls: ToolCalls, bodies: Sequence[str], ids: Sequence[int]) -> Document:
    """Return the document for calls behind a special token, after text or alone."""
    opening, *between = (f"<[{token_id}]>" for token_id in ids)
    names = [tool.name for tool in calls.tools]
    if between:
        each = [
            f"{opening} {literal(name)} {between[0]} {BLANKS} {body}"
            for name, body in zip(names, bodies, strict=True)
        ]
        rules = f"call: {' | '.join(each)}\ncalls: call{'' if calls.single else '+'}\n"
    else:
        more = "" if calls.single else f'({BLANKS} "," {BLANKS} object)*'
        rules = _objects(_heads(calls, "arguments"), bodies)
        rules += f'calls: {opening} {BLANKS} "[" {BLANKS} object {more} {BLANKS} "]"\n'
    answer = TextRule("said", f"said: {ANYTHING}\n") if calls.text is None else text_rule(calls.text)
    before = " | said calls" if calls.text is None else ""
    start = "start: calls\n" if calls.required else f"start: {answer.body} | calls{before}\n{answer.rules}"
    schemas = [*strict_schemas(calls), ("$", answer.schema)]
    return Document(start + rules, answer.nested, [] if calls.required else [""], schemas, tuple(ids))


def _at_the_beginning(calls: ToolCalls, bodies: Sequence[str], reasoning: Reasoning | None) -> Document:
    """Return the document for an answer that is calls, or text that begins as none.

    White space before a call is of one expression with its head: by itself, it would begin text.
    """
    lines = calls.bare == "line"
    heads = [f"{tool.name}\n" for tool in calls.tools] if lines else _heads(calls, "parameters")
    closing = "" if lines else ' "}"'
    rules = "".join(
        f"HEAD{at}: /{_BLANK}{escaped(head)}/\ncall{at}: HEAD{at} {body}{closing}\n"
        for at, (head, body) in enumerate(zip(heads, bodies, strict=True))
    )
    more = "" if calls.single or lines else f'({BLANKS} ";" call)*'
    rules += f"call: {' | '.join(f'call{at}' for at in range(len(heads)))}\ncalls: call {more} {BLANKS}\n"
    thought = Thought.of(reasoning)
    thinking = "" if reasoning is None else "thinking " if reasoning.begun else "thinking? "
    openings = [f"{before}{head}" for before in thought.openings for head in heads]
    answer = "calls"
    if not calls.required:
        # What begins as reasoning is reasoning.
        others = [_line_begun(calls) if lines else _OBJECT_BEGUN]
        if reasoning is not None and not reasoning.begun:
            others.append(_thought_begun(reasoning))
        rules += f"SAID: {' & ~'.join((ANYTHING, *others))}\n"
        answer, openings = "(calls | SAID)", [*openings, *thought.openings]
    start = f"start: {thinking}{answer}\n"
    return Document(start + thought.rules + rules, None, openings, strict_schemas(calls))


def _line_begun(calls: ToolCalls) -> str:
    """Return the regular expression of text that begins with a tool's name on a line of its own."""
    names = "|".join(escaped(tool.name) for tool in calls.tools)
    return f"/\\s*({names})[ \\t]*\\n(?s:.*)/"


def _thought_begun(reasoning: Reasoning) -> str:
    """Return the regular expression of text that begins as reasoning."""
    return f"/\\s*{escaped(reasoning.begin)}(?s:.*)/"


def _among_text(calls: ToolCalls, begin: str, reasoning: Reasoning | None) -> tuple[str, str]:
    """Return the rules for text with calls in it, whose objects stand behind `begin`.

    Text that begins as reasoning may begin is reasoning: a mark within that is none. Nothing follows the only
    call that there may be.
    """
    more = "" if calls.single else "(before body)* REST"
    answer = more or "(before body | REST)"
    rules = f"before[suffix={literal(begin)}]: {ANYTHING}\n"
    rules += f"REST: {ANYTHING} & ~/(?s:.*{escaped(begin)}.*)/\n"
    if reasoning is None or reasoning.begun:
        return f"start: {'' if reasoning is None else 'thought '}{answer}\n", rules
    rules += f"SAID: {ANYTHING} & ~{_thought_begun(reasoning)}\nLAST: SAID & REST\n"
    rules += f"said[suffix={literal(begin)}]: SAID\n"
    return f"start: thought {answer} | said body {more} | LAST\n", rules
