import json
from typing import Any

import jsonschema
import pytest

from tests.triton_models.text.test_call_grammar import SCHEMAS, obj, rules
from tests.triton_models.text.walks import Walker
from triton_models.errors import InvalidGrammarError, TokenMaskError
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import CallableTool, Grammar, Reasoning
from wire.limits import TOOLS_LIMIT


@pytest.fixture(scope="module", params=["chatglm3", "glm4"])
def walker(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Walker:
    return Walker(tokenizers[request.param], request.param)


def test_calls_without_a_format_are_a_list(walker: Walker) -> None:
    schemas = {"get_a": SCHEMAS["plain"], "get_b": obj(b={"type": "null"})}
    tools = [CallableTool(name, schema) for name, schema in schemas.items()]
    counts = set()
    for seed in range(30):
        walk = walker.walk("tool_calls", rules(*tools, required=True), seed=seed, raw=True)
        if walk.ended:
            calls = json.loads(walk.text)
            counts.add(len(calls))
            for call in calls:
                assert call.keys() == {"name", "arguments"}
                jsonschema.validate(call["arguments"], schemas[call["name"]])
    assert {1, 2} <= counts
    walks = [
        walker.walk("tool_calls", rules(*tools, required=True, single=True), seed=seed, raw=True)
        for seed in range(5)
    ]
    assert {len(json.loads(walk.text)) for walk in walks if walk.ended} == {1}


def test_a_list_of_calls_is_refused_by_its_part(walker: Walker) -> None:
    with pytest.raises(InvalidGrammarError, match="calls cannot be told from text"):
        walker.walk("tool_calls", rules(CallableTool("f")), raw=True)
    unenforced = CallableTool("g", obj(a={"type": "array", "uniqueItems": True}))
    assert walker.walk("tool_calls", rules(CallableTool("f"), unenforced, required=True), raw=True).text
    strict = CallableTool("g", unenforced.parameters, strict=True)
    with pytest.raises(InvalidGrammarError, match=r"^tool g: .*uniqueItems"):
        walker.walk("tool_calls", rules(CallableTool("f"), strict, required=True), raw=True)


def told(walker: Walker, grammar: Grammar, text: str) -> str:
    """Return how much of an answer to a raw prompt a grammar allows, and `.` if the answer may end there."""
    mask, ids = walker.grammars.compile(grammar, continues=True).mask(), walker.tokenizer.encode(text)
    for at, token_id in enumerate(ids):
        try:
            mask.accept(token_id)
        except TokenMaskError:
            return walker.tokenizer.decode(ids[:at])
    return text + "." if walker.format.stop_ids <= set(walker.allowed(mask)) else text


CALL = '<call>{"name": "f", "arguments": {"a": true}}</call>'
MARKED: dict[str, Any] = {"marks": ("<call>", "</call>")}
BOOLEAN = CallableTool("f", obj(a={"type": "boolean"}), strict=True)


@pytest.mark.parametrize(
    ("more", "text", "allowed"),
    [
        ({}, "Hello", "Hello."),
        ({}, "a <cal", "a <cal."),
        ({}, f"Look: {CALL} and {CALL}\nDone", f"Look: {CALL} and {CALL}\nDone."),
        ({}, CALL[:-1], CALL[:-1]),
        ({}, CALL.replace("true", "1"), CALL.partition("true")[0]),
        ({"single": True}, f"Look: {CALL}", f"Look: {CALL}."),
        ({"single": True}, f"Look: {CALL} Done", f"Look: {CALL}"),
        ({"single": True}, "Hello", "Hello."),
        ({"required": True}, f"{CALL}\n{CALL}", f"{CALL}\n{CALL}."),
        ({"required": True}, "Hello", ""),
        ({"required": True, "single": True}, CALL, CALL + "."),
        ({"text": Grammar("choice", '["yes", "no"]')}, "yes", "yes."),
        ({"text": Grammar("choice", '["yes", "no"]')}, CALL + CALL, CALL + CALL + "."),
        ({"text": Grammar("lark", 'start: "yes"')}, "yes", "yes."),
        ({"text": Grammar("choice", '["yes", "no"]')}, "Hello", ""),
    ],
)
def test_calls_within_marks(glm4: Tokenizer, more: Any, text: str, allowed: str) -> None:
    walker = Walker(glm4, "glm4")
    assert told(walker, Grammar("tool_calls", rules(BOOLEAN, **MARKED, **more)), text) == allowed


BARE_CALL = '{"name": "f", "parameters": {"a": true}}'


@pytest.mark.parametrize(
    ("more", "text", "allowed"),
    [
        ({}, "Hello", "Hello."),
        ({}, "", "."),
        ({}, '{"key": 1}', '{"key": 1}.'),
        ({}, f"So: {BARE_CALL}", f"So: {BARE_CALL}."),
        ({}, BARE_CALL, BARE_CALL + "."),
        ({}, f"{BARE_CALL}; {BARE_CALL}", f"{BARE_CALL}; {BARE_CALL}."),
        ({}, BARE_CALL.replace("true", "1"), BARE_CALL.partition("true")[0]),
        ({}, BARE_CALL + " Done", BARE_CALL + " "),
        ({}, '{"name": "g"', '{"name": "'),
        ({}, f"\n{BARE_CALL}", f"\n{BARE_CALL}."),
        ({}, ' {"name":"', ' {"name":'),
        ({"single": True}, f"{BARE_CALL};", BARE_CALL),
        ({"single": True}, f"{BARE_CALL}\n", f"{BARE_CALL}\n."),
        ({"required": True}, BARE_CALL, BARE_CALL + "."),
        ({"required": True}, "Hello", ""),
    ],
)
def test_calls_that_begin_an_answer(glm4: Tokenizer, more: Any, text: str, allowed: str) -> None:
    walker = Walker(glm4, "glm4")
    assert told(walker, Grammar("tool_calls", rules(BOOLEAN, bare="object", **more)), text) == allowed


LINE_CALL = 'f\n{"a": true}'


@pytest.mark.parametrize(
    ("more", "text", "allowed"),
    [
        ({}, "Hello", "Hello."),
        ({}, "f is a tool", "f is a tool."),
        ({}, "It is\nf\n{", "It is\nf\n{."),
        ({}, LINE_CALL, LINE_CALL + "."),
        ({}, LINE_CALL + "\n", LINE_CALL + "\n."),
        ({}, LINE_CALL + "\nDone", LINE_CALL + "\n"),
        ({}, LINE_CALL.replace("true", "1"), LINE_CALL.partition("true")[0]),
        ({}, "f\nis", "f\n"),
        ({"required": True}, "Hello", ""),
    ],
)
def test_a_call_whose_name_is_a_line(glm4: Tokenizer, more: Any, text: str, allowed: str) -> None:
    walker = Walker(glm4, "glm4")
    assert told(walker, Grammar("tool_calls", rules(BOOLEAN, bare="line", **more)), text) == allowed


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("bare", "call"), [("object", BARE_CALL), ("line", LINE_CALL)])
def test_calls_and_text_begin_behind_reasoning(glm4: Tokenizer, bare: str, call: str, *, begun: bool) -> None:
    walker = Walker(glm4, "glm4")
    reasoning = Reasoning(begin="<think>", end="</think>", begun=begun)
    grammar = Grammar("tool_calls", rules(BOOLEAN, bare=bare), reasoning)
    thought = f"{'' if begun else '<think>'}Hm: {call}?</think>"
    for text in (call, "Hello"):
        assert told(walker, grammar, f"{thought}\n{text}") == f"{thought}\n{text}."
        assert told(walker, grammar, text) == (text if begun else text + ".")
    wrong = call.replace("true", "1")
    assert told(walker, grammar, thought + wrong) == thought + wrong.partition("1")[0]


def test_bare_calls_are_not_told_from_text_with_a_grammar(glm4: Tokenizer) -> None:
    grammar = Grammar("tool_calls", rules(BOOLEAN, bare="object", text=Grammar("json_object")))
    with pytest.raises(InvalidGrammarError, match="cannot be told from text"):
        Walker(glm4, "glm4").grammars.compile(grammar, continues=True)


LISTED_CALL = '{"name": "f", "arguments": {"a": true}}'
OPENING, BETWEEN, OTHER = "<|assistant|>", "<|system|>", "<sop>"
"""Special tokens of this tokenizer, in the place of Mistral's."""
LIST: dict[str, Any] = {"opening": OPENING}
NAMED: dict[str, Any] = {"opening": OPENING, "between": BETWEEN}


@pytest.mark.parametrize(
    ("more", "parts", "allowed"),
    [
        (LIST, ["Hello"], "Hello."),
        (LIST, [OPENING, f"[{LISTED_CALL}]"], f"[{LISTED_CALL}]."),
        (
            LIST,
            ["So: ", OPENING, f" [{LISTED_CALL}, {LISTED_CALL}]"],
            f"So:  [{LISTED_CALL}, {LISTED_CALL}].",
        ),
        (LIST, [OPENING, f"[{LISTED_CALL}".replace("true", "1")], "[" + LISTED_CALL.partition("true")[0]),
        (LIST, [OPENING, f"[{LISTED_CALL}]", OPENING], f"[{LISTED_CALL}]"),
        (LIST, [BETWEEN], ""),
        (NAMED, [OTHER], ""),
        (LIST | {"single": True}, [OPENING, f"[{LISTED_CALL},"], f"[{LISTED_CALL}"),
        (LIST | {"required": True}, ["Hello"], ""),
        (LIST | {"required": True}, [OPENING, f"[{LISTED_CALL}]"], f"[{LISTED_CALL}]."),
        (LIST | {"text": Grammar("json_object")}, ['{"a": 1}'], '{"a": 1}.'),
        (LIST | {"text": Grammar("json_object")}, [OPENING, f"[{LISTED_CALL}]"], f"[{LISTED_CALL}]."),
        (LIST | {"text": Grammar("json_object")}, ["Hello"], ""),
        (NAMED, ["Hello"], "Hello."),
        (NAMED, ["So:", OPENING, "f", BETWEEN, '{"a": true}'], 'So:f{"a": true}.'),
        (NAMED, [OPENING, "f", BETWEEN, '{"a": true}'] * 2, 'f{"a": true}f{"a": true}.'),
        (NAMED | {"single": True}, [OPENING, "f", BETWEEN, '{"a": true}', OPENING], 'f{"a": true}'),
        (NAMED, [OPENING, "g"], ""),
        (NAMED, [OPENING, "f", BETWEEN, '{"a": 1}'], 'f{"a": '),
    ],
)
def test_calls_behind_a_special_token(glm4: Tokenizer, more: Any, parts: list[str], allowed: str) -> None:
    walker = Walker(glm4, "glm4")
    mask = walker.grammars.compile(Grammar("tool_calls", rules(BOOLEAN, **more)), continues=True).mask()
    taken: list[int] = []
    refused = False
    for part in parts:
        special = glm4.special_ids.get(part)
        for token_id in glm4.encode(part) if special is None else [special]:
            try:
                mask.accept(token_id)
            except TokenMaskError:
                refused = True
                break
            taken.append(token_id)
        if refused:
            break
    ends = not refused and walker.format.stop_ids <= set(walker.allowed(mask))
    assert glm4.decode(taken) + "." * ends == allowed


@pytest.mark.parametrize("marks", [{"opening": "[TOOL_CALLS]"}, LIST | {"between": "[ARGS]"}])
def test_calls_behind_what_is_no_special_token_are_not_told_from_text(glm4: Tokenizer, marks: Any) -> None:
    for required in (False, True):
        grammar = Grammar("tool_calls", rules(BOOLEAN, required=required, **marks))
        with pytest.raises(InvalidGrammarError, match="cannot be told from text"):
            Walker(glm4, "glm4").grammars.compile(grammar, continues=True)


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_comes_first(glm4: Tokenizer, begun: bool) -> None:
    walker = Walker(glm4, "glm4")
    reasoning = Reasoning(begin="<think>", end="</think>", begun=begun)
    thought = "Hm, <call> or {}?</think>"
    thought = thought if begun else "<think>" + thought
    for more, text in (
        ({"required": True}, CALL),
        ({}, f"Look: {CALL} and"),
        ({"text": Grammar("json_object")}, '{"a": 1}'),
    ):
        grammar = Grammar("tool_calls", rules(BOOLEAN, **MARKED, **more), reasoning)
        assert told(walker, grammar, f"{thought}\n\n{text}") == f"{thought}\n\n{text}."
        if not begun:
            assert told(walker, grammar, text) == text + "."
    for grammar in (Grammar("regex", "a+", reasoning), Grammar("lark", 'start: "a"', reasoning)):
        assert told(walker, grammar, f"{thought}\n\na") == f"{thought}\n\na."
        assert told(walker, grammar, "b" + thought) == (f"b{thought}" if begun else "")
    for regex in ("[^/]+", "[<>a-z]+", "<[a-z>]+"):  # which may begin as a mark does, or hold one
        grammar = Grammar("regex", regex, reasoning)
        assert told(walker, grammar, f"{thought}\n\n<thing") == f"{thought}\n\n<thing."
        if not begun:
            assert told(walker, grammar, "<thing") == "<thing."
            assert told(walker, grammar, f"\n{thought}<a") == f"\n{thought}<a."
    single = Grammar("tool_calls", rules(BOOLEAN, **MARKED, single=True), reasoning)
    for before in (thought,) if begun else ("", thought):
        for text, allowed in ((f"Look: {CALL}", "."), (f"{CALL}\n", ""), ("Look <", ".")):
            assert told(walker, single, before + text) == before + text.rstrip() + allowed
    listed = Grammar("tool_calls", rules(BOOLEAN, required=True), reasoning)
    calls = '[{"name": "f", "arguments": {"a": false}},{"name": "f", "arguments": {"a": true}}]'
    assert told(walker, listed, thought + calls) == thought + calls + "."


@pytest.mark.parametrize(
    ("more", "call"),
    [
        (MARKED, '<call>{"name": "f511", "arguments": {"a": 511}}</call>'),
        ({"bare": "object"}, '{"name": "f511", "parameters": {"a": 511}}'),
        ({"bare": "line"}, 'f511\n{"a": 511}'),
    ],
)
def test_the_last_of_very_many_tools_can_be_called(walker: Walker, more: dict[str, Any], call: str) -> None:
    tools = [CallableTool(f"f{number}", obj(a={"const": number})) for number in range(TOOLS_LIMIT)]
    grammar = Grammar("tool_calls", rules(*tools, **more))
    assert told(walker, grammar, call) == call + "."
    assert told(walker, grammar, call.replace("511}", "510}")) != call.replace("511}", "510}") + "."
