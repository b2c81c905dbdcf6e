import copy
import json
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from tests.triton_models.text.walks import Walker, Words
from triton_models.errors import InvalidGrammarError, LibraryPanicError, TokenMaskError
from triton_models.text import grammars
from triton_models.text.grammars import CACHED, STACK_BYTES, CompiledGrammar, on_deep_stack
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar

SEEDS = range(12)

ADDRESS = {"type": "object", "properties": {"城": {"type": "string", "maxLength": 5}}, "required": ["城"]}
SCHEMAS: dict[str, Any] = {
    "record": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 8},
            "age": {"type": "integer", "minimum": 3, "maximum": 120},
            "height": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
            "tags": {
                "type": "array",
                "items": {"enum": ["a b", "你", 3, None]},
                "minItems": 1,
                "maxItems": 3,
            },
            "home": {"$ref": "#/$defs/address"},
            "ok": {"type": ["boolean", "null"]},
        },
        "required": ["name", "age", "tags", "home", "ok"],
        "additionalProperties": False,
        "$defs": {"address": ADDRESS},
    },
    "union": {
        "anyOf": [{"type": "integer"}, {"type": "array", "prefixItems": [{"const": 1}], "items": False}]
    },
    "old tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"const": 1}, {"type": "null"}],
        "additionalItems": {"const": 2},
        "minItems": 3,
        "maxItems": 4,
    },
    "pattern": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{1,3}$"},
    "decimal": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "maxLength": 9},
    "checked": {
        "type": "string",
        "format": "includes",
        "maxLength": 6,
        "allOf": [
            {"type": "string", "pattern": "^[a-c].*"},
            {"type": "string", "format": "uppercase", "pattern": "^[^a-z]*1?"},
        ],
    },
    "no format": {"type": ["integer", "null"], "format": "int32", "minimum": 0, "maximum": 99},
    "date": {"type": "string", "format": "date"},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "c": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "records": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {
            "type": "object",
            "propertyNames": {},
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 2,
        },
        "maxProperties": 2,
    },
    "listed names": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["b"],
    },
    "anything": {},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 1000},
    "merged": {
        "allOf": [ADDRESS, {"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"]}]
    },
}


@pytest.fixture(scope="module")
def walkers(tokenizers: dict[str, Tokenizer]) -> dict[str, Walker]:
    return {name: Walker(tokenizer, name) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module", params=["chatglm2", "chatglm3", "glm4"])
def walker(request: pytest.FixtureRequest, walkers: dict[str, Walker]) -> Walker:
    return walkers[request.param]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_that_ends_validates(walker: Walker, name: str, raw: bool) -> None:
    ended = 0
    for seed in SEEDS:
        walk = walker.walk("json_schema", json.dumps(SCHEMAS[name]), seed=seed, raw=raw)
        if walk.ended:
            ended += 1
            jsonschema.validate(json.loads(walk.text), SCHEMAS[name])
    assert ended > len(SEEDS) / 3


@pytest.mark.parametrize("more", [0, 1, 31])
def test_a_vocabulary_may_have_any_size(tokenizers: dict[str, Tokenizer], more: int) -> None:
    """Whether or not its ids fill the last word of a mask."""
    tokenizer = tokenizers["chatglm3"]
    sized = copy.copy(tokenizer)
    sized.size = -(-tokenizer.size // 32) * 32 + more
    walk = Walker(sized, "chatglm3").walk("regex", "[a-c]{2,4}")
    assert re.fullmatch("[a-c]{2,4}", walk.text)


def test_any_object_is_an_object(walker: Walker) -> None:
    walks = [walker.walk("json_object", seed=seed) for seed in SEEDS]
    assert any(walk.ended for walk in walks)
    assert all(isinstance(json.loads(walk.text), dict) for walk in walks if walk.ended)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "pattern",
    ["[a-c]{2,4}", "^(yes|no)$", " x| y", "/\\d{2}/", "[\U0001f600-\U0001f64f]{1,2}", "a?", "你好+"],
)
def test_regular_expressions_hold_for_the_text_as_it_is_shown(
    walker: Walker, pattern: str, raw: bool
) -> None:
    for seed in SEEDS:
        walk = walker.walk("regex", pattern, seed=seed, raw=raw)
        assert walk.ended
        assert re.fullmatch(pattern, walk.text), walk.text


@pytest.mark.parametrize("raw", [False, True])
def test_choices_are_told_exactly(walker: Walker, raw: bool) -> None:
    choices = [" yes", "yes", "no ", 'say "no"', "\\n", "\n", "是的", "🙂", "<|user|>", "\x01", "a/b"]
    said = {walker.walk("choice", json.dumps(choices), seed=seed, raw=raw).text for seed in range(60)}
    assert said <= set(choices)
    assert {" yes", "yes"} & said
    for choice in choices:
        assert walker.walk("choice", json.dumps([choice]), raw=raw).text == choice


def references(count: int) -> str:
    nodes = {f"d{at}": {"properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**nodes, f"d{count}": {"type": "null"}}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", references(3000)),
        ("lark", "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(9000)) + 'r9000: "a"\n'),
        ("lark", "start: R0\n" + "".join(f'R{at}: "a" R{at + 1}\n' for at in range(9000)) + 'R9000: "a"\n'),
    ],
)
def test_deep_grammars_compile_and_end_no_process(walkers: dict[str, Walker], kind: str, text: str) -> None:
    assert walkers["chatglm3"].walk(kind, text, steps=3).ids


def test_lark_and_gbnf(walker: Walker) -> None:
    lark = 'start: word (" " word)*\nword: /[ab]/ // a letter, not <a token>\n%llguidance {}\n'
    assert re.fullmatch("[ab]( [ab])*", walker.walk("lark", lark).text)
    gbnf = 'root ::= item+\nitem ::= "x" | [0-9]'
    assert re.fullmatch("[x0-9]+", walker.walk("lark", gbnf).text)


def test_the_encodings_of_a_text_are_among_the_walks(walker: Walker) -> None:
    """As the tokenizer writes it, and byte by byte."""
    text = '{"城": "北京 🙂"}'
    tokenizer = walker.tokenizer
    bytes_ = {piece: at for at in range(tokenizer.size) if isinstance(piece := tokenizer.piece(at), bytes)}
    singly = [bytes_[bytes([byte])] for byte in text.encode()]
    if walker.format.name != "glm4":
        # SentencePiece's own prefix, and the piece that stands for every space.
        space = next(at for at in range(tokenizer.size) if tokenizer.piece(at) == " ")
        singly = [space, *(space if at == bytes_[b" "] else at for at in singly)]
    for ids in (tokenizer.encode(text), singly):
        mask = walker.grammars.compile(Grammar("json_object")).mask()
        for token_id in ids:
            assert token_id in walker.allowed(mask)
            mask.accept(token_id)
        assert walker.format.stop_ids <= set(walker.allowed(mask))
        assert tokenizer.decode(ids) == text


def test_no_other_special_id_is_ever_allowed(walker: Walker) -> None:
    tokenizer = walker.tokenizer
    special = {each for each in range(tokenizer.size) if not tokenizer.piece(each)}
    mask = walker.grammars.compile(Grammar("regex", "(.|\\n)*")).mask()
    allowed = set(walker.allowed(mask))
    assert allowed & special <= walker.format.stop_ids
    mask.accept(tokenizer.encode("a")[0])
    allowed = set(walker.allowed(mask))
    assert allowed & special == walker.format.stop_ids
    assert len(allowed) > tokenizer.size / 2


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "JSON"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"items": {"not": {}}}', r"^\$\.items: .*not"),
        ("json_schema", '{"properties": {"a": {"uniqueItems": true}}}', r"^\$\.properties\.a: .*uniqueItems"),
        ("json_schema", '{"items": {"type": "string", "pattern": "a(?=b)"}}', r"^\$\.items: .*look-ahead"),
        ("json_schema", '{"if": {}}', "if"),
        ("json_schema", '{"propertyNames": {"pattern": "^a"}}', "propertyNames"),
        ("json_schema", '{"items": [{}], "prefixItems": [false]}', r"^\$: prefixItems"),
        ("json_schema", '{"properties": {"a": {"minProperties": 2}}}', r"\$\.properties\.a: minProperties"),
        (
            "json_schema",
            '{"items": {"enum": [1, 9007199254740993]}}',
            r"^\$\.items: .*2\^53 in const or enum",
        ),
        ("json_schema", '{"minimum": 1%s}' % ("0" * 400), "minimum"),
        ("json_schema", '{"$ref": "http://example.com/a"}', "example.com"),
        ("json_schema", '{"type": "string", "format": "colour"}', "colour"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"minimum": 3}]}', r"^\$: branches of oneOf may"),
        ("json_schema", '{"type": "string", "pattern": "("}', "regex"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        ("json_schema", '{"anyOf": []}', "."),
        ("regex", "(", "regex"),
        ("regex", "a(?=b)", "look-ahead"),
        ("choice", "[]", "choices"),
        ("lark", "start: nobody", "nobody"),
        ("lark", "end: /a/", "start"),
        ("lark", 'start: "a" <|user|>', "special"),
        ("lark", 'start: "a" <[5]>', "special"),
        ("lark", "start: <[*]>", "special"),
        ("lark", "root ::= (", "GBNF"),
    ],
)
def test_what_cannot_be_enforced_is_refused(walker: Walker, kind: str, text: str, why: str) -> None:
    with pytest.raises(InvalidGrammarError, match=why) as refused:
        walker.grammars.compile(Grammar(kind, text))
    assert len(str(refused.value)) < 400
    assert "backtrace" not in str(refused.value)


def test_compiled_grammars_are_kept_up_to_a_bound(walker: Walker) -> None:
    compile_ = walker.grammars.compile
    first = compile_(Grammar("regex", "first"))
    for number in range(CACHED - 1):
        compile_(Grammar("regex", f"x{number}"))
        assert compile_(Grammar("regex", "first")) is first
    assert compile_(Grammar("regex", "first"), continues=True) is not first
    for number in range(CACHED):
        compile_(Grammar("regex", f"y{number}"))
    assert compile_(Grammar("regex", "first")) is not first


def test_large_grammars_are_kept_up_to_a_sum_of_their_lengths(
    walkers: dict[str, Walker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "CACHED_CHARACTERS", 1000)
    compile_ = walkers["chatglm3"].grammars.compile
    texts = [Grammar("regex", f"{number}{'x' * 240}") for number in range(5)]
    first, second, *_ = [compile_(each) for each in texts[:4]]
    assert compile_(texts[0]) is first
    compile_(texts[4])
    assert compile_(texts[0]) is first
    assert compile_(texts[1]) is not second


def test_masks_of_one_grammar_go_their_own_ways(walkers: dict[str, Walker]) -> None:
    walker = walkers["chatglm3"]
    walks: list[str] = []

    def work(seed: int) -> None:
        walks.append(walker.walk("regex", f"[a-z]{{20}}{seed % 2}", seed=seed).text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(walks)) == 8
    assert all(re.fullmatch("[a-z]{20}[01]", walk) for walk in walks)


def test_a_mask_that_is_told_nonsense_fails(walkers: dict[str, Walker]) -> None:
    walker = walkers["chatglm3"]
    compiled = walker.grammars.compile(Grammar("regex", "ab"))
    mask = compiled.mask()
    with pytest.raises(TokenMaskError, match="left its grammar"):
        mask.accept(next(each for each in range(300) if each not in walker.allowed(compiled.mask())))
    with pytest.raises(TokenMaskError):
        mask.fill(Words(walker.tokenizer.size))
    assert walker.allowed(compiled.mask())


def test_a_row_is_written_whole_and_nothing_behind_it(walkers: dict[str, Walker]) -> None:
    walker = walkers["chatglm3"]
    words = Words(walker.tokenizer.size)
    walker.grammars.compile(Grammar("json_object")).mask().fill(words)
    assert np.count_nonzero(words.array)
    assert not words.array[-4:].any()


def test_a_grammar_that_wore_out_is_compiled_anew(
    walkers: dict[str, Walker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its answers share adds up, until none could begin."""
    pattern, few = "[ab]*a[ab]{15}", llguidance.LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    walker = walkers["chatglm3"]
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "LIMITS", few)
        worn = walker.grammars.compile(Grammar("regex", pattern))
        walks = (walker.walk("regex", pattern, seed=seed, steps=60) for seed in range(200))
        with pytest.raises(TokenMaskError, match="too complex"):
            deque(walks, maxlen=0)
        assert worn.spent
        assert walker.walk("regex", pattern, steps=60).ids


def test_a_grammar_is_compiled_anew_before_it_wears_out(
    walkers: dict[str, Walker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "SPENT_AFTER", 100)
    walker, grammar = walkers["chatglm3"], Grammar("regex", "[xy]*")
    first = walker.grammars.compile(grammar)
    walker.walk("regex", grammar.text, steps=40)
    assert walker.grammars.compile(grammar) is first
    mask = first.mask()
    for _ in range(100):
        mask.accept(next(each for each in walker.allowed(mask) if each not in walker.format.stop_ids))
    assert walker.grammars.compile(grammar) is not first
    assert walker.allowed(mask), "an answer under way goes on with the old one"


class Panic(BaseException):
    """As what Python sees of a panic in Rust: no `Exception`."""


def _copy(compiled: CompiledGrammar, _walker: Walker) -> None:
    compiled.mask()


def _fill(compiled: CompiledGrammar, walker: Walker) -> None:
    compiled.mask().fill(Words(walker.tokenizer.size))


def _accept(compiled: CompiledGrammar, _walker: Walker) -> None:
    compiled.mask().accept(0)


@pytest.mark.parametrize(
    ("method", "ask"), [("deep_copy", _copy), ("unsafe_compute_mask_ptr", _fill), ("consume_token", _accept)]
)
def test_a_grammar_that_met_a_panic_is_compiled_anew(
    method: str,
    ask: Callable[[CompiledGrammar, Walker], None],
    walkers: dict[str, Walker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def panic(*_: object) -> None:
        raise Panic

    walker, grammar = walkers["chatglm3"], Grammar("regex", f"{method}[xy]*")
    compiled = walker.grammars.compile(grammar)
    assert walker.grammars.compile(grammar) is compiled
    with monkeypatch.context() as patched:
        patched.setattr(llguidance.LLMatcher, method, panic)
        with pytest.raises((Panic, LibraryPanicError)):
            ask(compiled, walker)
    assert compiled.spent
    assert walker.grammars.compile(grammar) is not compiled


def test_it_runs_elsewhere_and_brings_back_what_came_of_it() -> None:
    assert on_deep_stack(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)


def test_what_takes_too_long_is_given_up_and_holds_up_nobody(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Walker(tokenizers["chatglm3"], "chatglm3").grammars
    go_on = threading.Event()
    work = own._compile_or_blame

    def slow(grammar: Grammar, **options: Any) -> CompiledGrammar:
        if grammar.text == "slow":
            go_on.wait()
        return work(grammar, **options)

    monkeypatch.setattr(own, "_compile_or_blame", slow)
    monkeypatch.setattr(grammars, "COMPILE_S", 0.05)
    for _ in range(grammars.COMPILED_AT_ONCE - 1):
        with pytest.raises(InvalidGrammarError, match="takes more than"):
            own.compile(Grammar(kind="regex", text="slow"))
    monkeypatch.setattr(grammars, "COMPILE_S", 60.0)
    assert own.compile(Grammar(kind="regex", text="quick"))
    monkeypatch.setattr(grammars, "COMPILE_S", 0.05)
    with pytest.raises(InvalidGrammarError, match="takes more than"):
        own.compile(Grammar(kind="regex", text="slow"))
    with pytest.raises(InvalidGrammarError, match="try again later"):
        own.compile(Grammar(kind="regex", text="another"))
    go_on.set()
    monkeypatch.setattr(grammars, "COMPILE_S", 60.0)
    for _ in range(grammars.COMPILED_AT_ONCE):
        assert own._threads.acquire(timeout=60)
    own._threads.release(grammars.COMPILED_AT_ONCE)
    assert own.compile(Grammar(kind="regex", text="another"))


def test_a_thread_that_cannot_be_had_is_missed_once(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Walker(tokenizers["chatglm3"], "chatglm3").grammars

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(grammars.COMPILED_AT_ONCE):
            with pytest.raises(RuntimeError, match="new thread"):
                own.compile(Grammar(kind="regex", text="a"))
    assert own.compile(Grammar(kind="regex", text="a"))


def test_only_that_thread_has_the_stack() -> None:
    usual = threading.stack_size()
    assert usual != STACK_BYTES
    assert on_deep_stack(threading.stack_size) in {usual, STACK_BYTES}
    assert threading.stack_size() == usual


ODD = [
    "\x00",
    "\x01\b",
    "\x1b",
    "\x7f",
    "\x85",
    "\x9f",
    "\u2028",
    "\u2029",
    "\ufeff",
    'a\x7f/\f"\\n',
    "\U0010ffff",
]


@pytest.mark.parametrize("text", ODD)
def test_any_character_may_be_part_of_a_choice(walkers: dict[str, Walker], text: str) -> None:
    for choice in (text, f"x{text}y"):
        assert walkers["chatglm3"].walk("choice", json.dumps([choice])).text == choice


@pytest.mark.parametrize("name", ODD)
def test_any_character_may_be_part_of_a_property_and_a_constant(
    walkers: dict[str, Walker], name: str
) -> None:
    parameters = {"type": "object", "properties": {name: {"const": name}}, "required": [name]}
    tools = [{"name": "f", "parameters": parameters, "strict": True}]
    rules = Grammar("tool_calls", json.dumps({"tools": tools, "required": True, "single": True}))
    walk = walkers["chatglm3"].walk("tool_calls", rules.text)
    assert walk.ended
    assert walk.text.count(json.dumps(name, ensure_ascii=False)[1:-1]) == 2
