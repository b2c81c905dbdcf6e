"""Our own contract with a tokenizer in the gateway: what is sent, and whose conversations it is for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.events import CallPart, Delta, Reasoning
from gateway.core.request import (
    Conversation,
    Generation,
    Grammar,
    Message,
    NamedTool,
    PlainText,
    TokenIds,
    Tool,
    ToolOffer,
)
from gateway.errors import InvalidRequestError
from gateway.triton.dialects import Dialects
from gateway.triton.dialects.base import Dialect, ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.dialects.model_text import RenderedPrompt
from tests.gateway.triton.dialects.test_chatglm import ACCEPTED, END, USAGE, response
from tests.gateway.triton.fake_triton import having
from tests.template_checkpoint import REASONING, TEMPLATE, write_tokenizer
from wire import names
from wire.grammar import Grammar as WireGrammar
from wire.grammar import Reasoning as WireReasoning
from wire.grammar import decode_tool_calls
from wire.request import Generation as WireGeneration
from wire.request import decode_request
from wire.strings import unpack_strings

NO_FORMAT, OWN_FORMAT = ModelReport(), ModelReport(chat_format="chatglm3")
TALK = Conversation(messages=(Message(role="user", content="the weather"),))


@pytest.fixture(scope="module")
def dialect(tmp_path_factory: pytest.TempPathFactory) -> Dialect:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Dialects([f"m={folder}"]).of("m", having(CHATGLM.inputs))


def generation(prompt: Any = TALK, **changes: Any) -> Generation:
    return Generation(request_id="r", model="m", prompt=prompt, deadline=100.0, **changes)


async def sent(dialect: Dialect, request: Generation, report: ModelReport) -> WireGeneration:
    assert dialect.prepare is not None
    message = dialect.request(await dialect.prepare(request, report), report, 5.0)
    inputs = {
        tensor.name: unpack_strings(raw)[0]
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    decoded = decode_request(inputs[names.SAMPLING])
    assert isinstance(decoded, WireGeneration)
    return decoded


async def test_a_conversation_is_sent_as_ids(dialect: Dialect) -> None:
    request = await sent(dialect, generation(), NO_FORMAT)
    assert request.raw
    assert request.prompt_token_ids is not None
    assert dialect.tokens is not None


async def test_a_model_with_a_format_of_its_own_is_sent_turns(dialect: Dialect) -> None:
    request = await sent(dialect, generation(), OWN_FORMAT)
    assert request.prompt_token_ids is None
    assert not request.raw


@pytest.mark.parametrize(
    ("asked", "blank"),
    [
        ({}, True),
        ({"grammar": Grammar(kind="regex", text=" *a", field="f")}, False),
        ({"prompt": PlainText("the")}, False),
        ({"stop": []}, False),  # models that do not know of it are asked, too
    ],
)
async def test_stop_strings_are_not_found_in_white_space_before_a_conversations_answer(
    tmp_path: Path, asked: dict[str, Any], *, blank: bool
) -> None:
    request = generation(**{"stop": ["\n"]} | asked)
    assert (await sent(templated(tmp_path, LISTED), request, NO_FORMAT)).blank_start is blank


async def test_texts_and_ids_are_sent_as_ids(dialect: Dialect) -> None:
    text = await sent(dialect, generation(PlainText(text="the")), NO_FORMAT)
    ids = await sent(dialect, generation(TokenIds(ids=(3, 4))), NO_FORMAT)
    assert text.prompt_token_ids == [257]
    assert ids.prompt_token_ids == [3, 4]


@pytest.mark.parametrize(
    ("empty", "param"),
    [
        ({"prompt": PlainText("")}, "prompt"),
        ({"prompt": PlainText(""), "prompt_field": "prompt.1"}, "prompt.1"),
        ({"prompt": Conversation((Message(role="user", content="", field="messages.0"),))}, "messages.0"),
    ],
)
async def test_what_has_no_tokens_is_refused_by_its_name(
    tmp_path: Path, empty: dict[str, Any], param: str
) -> None:
    dialect = templated(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="no tokens") as refused:
        await sent(dialect, generation(**empty), NO_FORMAT)
    assert refused.value.param == param


TOOLS = tuple(Tool(name=name, description=None, parameters={}, strict=True) for name in ("now", "then"))
TEXT = Grammar(kind="json_object", field="response_format")
LISTED = "{{ messages[0].content }}{% if tools %}[TOOL_CALLS]{% endif %}"
"""The template of a model whose own calls no grammar can enforce."""
BARE = "{{ messages[0].content }}{% if tools %}<|python_tag|>{% endif %}"
"""That of one which begins an answer with them."""


def templated(folder: Path, template: str) -> Dialect:
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Dialects([f"m={folder}"]).of("m", having(CHATGLM.inputs))


def offering(**changes: Any) -> Conversation:
    return replace(TALK, offer=ToolOffer(tools=TOOLS, **changes))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("choice", "names", "single"),
    [("required", ["now", "then"], False), (NamedTool("then"), ["then"], True)],
)
@pytest.mark.parametrize("grammar", [None, TEXT])  # of a text, which there is none of
async def test_calls_that_must_come(
    tmp_path: Path, choice: Any, names: list[str], grammar: Any, *, single: bool, listed: bool
) -> None:
    dialect = templated(tmp_path, LISTED if listed else TEMPLATE)
    asked = generation(offering(choice=choice), grammar=grammar, stream=True)
    request = await sent(dialect, asked, NO_FORMAT)
    assert request.grammar is not None
    assert request.grammar.kind == "tool_calls"
    calls = decode_tool_calls(request.grammar.text)
    assert [(tool.name, tool.strict) for tool in calls.tools] == [(name, True) for name in names]
    assert (calls.required, calls.single, calls.text) == (True, single, None)
    assert calls.marks == (None if listed else ("<tool_call>", "</tool_call>"))
    assert dialect.prepare is not None
    answer = dialect.decoder(await dialect.prepare(asked, NO_FORMAT), NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    call = '{"name": "then", "arguments": {"a": 1}}'
    (last,) = answer.decode(response(f"[{call}]" if listed else f"<tool_call>{call}</tool_call>", END))
    assert isinstance(last, Delta)
    assert (last.pieces, last.finish_reason) == ((CallPart("then", '{"a": 1}'),), "tool_calls")


async def test_calls_that_may_come_are_enforced_within_marks(dialect: Dialect) -> None:
    for grammar in (None, TEXT):
        request = await sent(dialect, generation(offering(), grammar=grammar), NO_FORMAT)
        assert request.grammar is not None
        calls = decode_tool_calls(request.grammar.text)
        assert (calls.required, calls.marks) == (False, ("<tool_call>", "</tool_call>"))
        assert calls.text == (None if grammar is None else WireGrammar("json_object"))
    lenient = ToolOffer(tools=(replace(TOOLS[0], strict=False),))
    assert (await sent(dialect, generation(replace(TALK, offer=lenient)), NO_FORMAT)).grammar is None


async def test_calls_that_may_come_are_not_enforced_without_marks(tmp_path: Path) -> None:
    dialect = templated(tmp_path, LISTED)
    for grammar, param in ((None, "tools"), (TEXT, "response_format")):
        with pytest.raises(InvalidRequestError) as refused:
            await sent(dialect, generation(offering(), grammar=grammar), NO_FORMAT)
        assert refused.value.param == param
    request = await sent(dialect, generation(offering(choice="none"), grammar=TEXT), NO_FORMAT)
    assert request.grammar == WireGrammar("json_object")


LINE = "{{ messages[0].content }}{% if tools %}<|observation|>{% endif %}"
"""That of one whose calls are a name on a line, and arguments."""


@pytest.mark.parametrize(
    ("template", "bare", "call"),
    [
        (BARE, "object", '{"name": "then", "parameters": {"a": 1}}'),
        (LINE, "line", 'then\n{"a": 1}'),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
async def test_calls_that_may_come_are_enforced_where_an_answer_begins_with_them(
    tmp_path: Path, template: str, bare: str, call: str, *, thinks: bool
) -> None:
    dialect = templated(tmp_path, template + "{# </think> #}" * thinks)
    asked = generation(offering(), stream=True)
    request = await sent(dialect, asked, NO_FORMAT)
    assert request.grammar is not None
    calls = decode_tool_calls(request.grammar.text)
    assert (calls.required, calls.marks, calls.bare) == (False, None, bare)
    assert (request.grammar.reasoning is not None) is thinks
    assert dialect.prepare is not None
    answer = dialect.decoder(await dialect.prepare(asked, NO_FORMAT), NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    (last,) = answer.decode(response(call, END))
    assert isinstance(last, Delta)
    assert (last.pieces, last.finish_reason) == ((CallPart("then", '{"a": 1}'),), "tool_calls")
    with pytest.raises(InvalidRequestError) as refused:
        await sent(dialect, generation(offering(), grammar=TEXT), NO_FORMAT)
    assert refused.value.param == "response_format"
    required = await sent(dialect, generation(offering(choice="required")), NO_FORMAT)
    assert required.grammar is not None
    assert decode_tool_calls(required.grammar.text).bare is None


ARGS = "{# [ARGS] #}"


@pytest.mark.parametrize(("template", "between"), [(LISTED, None), (LISTED + ARGS, "[ARGS]")])
async def test_calls_that_may_come_are_enforced_behind_a_special_token(
    tmp_path: Path, template: str, between: str | None
) -> None:
    dialect = of_mistral(tmp_path / "plain", template)
    for grammar in (None, TEXT):
        asked = generation(offering(), grammar=grammar, stream=True)
        request = await sent(dialect, asked, NO_FORMAT)
        assert request.grammar is not None
        calls = decode_tool_calls(request.grammar.text)
        assert (calls.required, calls.opening, calls.between) == (False, "[TOOL_CALLS]", between)
        assert (calls.text is None) is (grammar is None)
        assert dialect.prepare is not None
        answer = dialect.decoder(await dialect.prepare(asked, NO_FORMAT), NO_FORMAT)
        answer.decode(response(meta=ACCEPTED))
        call = 'then[ARGS]{"a": 1}' if between else '[{"name": "then", "arguments": {"a": 1}}]'
        (last,) = answer.decode(response("[TOOL_CALLS]" + call, END))
        assert isinstance(last, Delta)
        assert (last.pieces, last.finish_reason) == ((CallPart("then", '{"a": 1}'),), "tool_calls")
    with_ids = of_mistral(tmp_path / "ids", template + "{# [CALL_ID] #}")
    with pytest.raises(InvalidRequestError):
        await sent(with_ids, generation(offering()), NO_FORMAT)


def of_mistral(folder: Path, template: str) -> Dialect:
    folder.mkdir()
    tokenizer = write_tokenizer(folder)
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return Dialects([f"m={folder}"]).of("m", having(CHATGLM.inputs))


async def test_calls_behind_a_token_are_not_enforced_where_the_model_may_reason(tmp_path: Path) -> None:
    dialect = of_mistral(tmp_path / "thinks", LISTED + "{# </think> #}")
    with pytest.raises(InvalidRequestError) as refused:
        await sent(dialect, generation(offering()), NO_FORMAT)
    assert refused.value.param == "tools"


def reasoning(folder: Path) -> Dialect:
    """Return the dialect of a model whose prompts end within the reasoning."""
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}</think><think>\n")
    return Dialects([f"m={folder}"]).of("m", having(CHATGLM.inputs))


@pytest.mark.parametrize("begun", [False, True])
async def test_reasoning_may_come_before_what_a_grammar_is_of(tmp_path: Path, *, begun: bool) -> None:
    dialect = reasoning(tmp_path) if begun else templated(tmp_path, TEMPLATE + "{# </think> #}")
    allowed = WireReasoning(begin="<think>", end="</think>", begun=begun)
    request = await sent(dialect, generation(grammar=TEXT), NO_FORMAT)
    assert request.grammar == WireGrammar("json_object", reasoning=allowed)
    assert dialect.prepare is not None
    answer = dialect.decoder(await dialect.prepare(generation(grammar=TEXT), NO_FORMAT), NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    said = f"{REASONING}</think>\n\n{{}}" if begun else f"<think>{REASONING}</think>\n\n{{}}"
    (last,) = answer.decode(response(said, END))
    assert isinstance(last, Delta)
    assert last.pieces == (Reasoning(REASONING), "{}")


async def test_no_reasoning_comes_before_a_grammar_where_it_is_switched_off(dialect: Dialect) -> None:
    off = replace(TALK, switches={"enable_thinking": False})
    request = await sent(dialect, generation(off, grammar=TEXT), NO_FORMAT)
    assert request.grammar == WireGrammar("json_object")


async def test_no_reasoning_comes_before_a_grammar_where_special_tokens_mark_it(tmp_path: Path) -> None:
    """Which no grammar of text has."""
    tokenizer = write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(LISTED + "[/THINK][THINK]")
    tokenizer.add_special_tokens(["[THINK]", "[/THINK]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    dialect = Dialects([f"m={tmp_path}"]).of("m", having(CHATGLM.inputs))
    required = offering(choice="required")
    for asked, param in ((generation(grammar=TEXT), TEXT.field), (generation(required), "tool_choice")):
        with pytest.raises(InvalidRequestError, match="begins with reasoning") as refused:
            await sent(dialect, asked, NO_FORMAT)
        assert refused.value.param == param


async def test_reasoning_is_counted_at_the_end_of_each_choice(tmp_path: Path) -> None:
    dialect = reasoning(tmp_path)
    assert dialect.prepare is not None
    assert dialect.channels is not None
    prepared = await dialect.prepare(generation(n=2), NO_FORMAT)
    answer = dialect.channels.decoder(prepared, NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    begun, rest = REASONING[:5], REASONING[5:] + "</think>\n\nYes"  # it is one token, and its mark another
    answer.deltas([(0, begun, 1, (), None), (0, rest, 1, (), None)])
    answer.decode(response("", {"finish_reason": "stop"}))
    (last,) = answer.decode(response(REASONING + "</think>", END | {"index": 1}))
    assert isinstance(last, Delta)
    assert last.usage is not None
    assert last.usage.reasoning_tokens == 2


async def test_no_more_reasoning_is_told_than_was_generated(tmp_path: Path) -> None:
    dialect = reasoning(tmp_path)
    assert dialect.prepare is not None
    answer = dialect.decoder(await dialect.prepare(generation(), NO_FORMAT), NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    (last,) = answer.decode(response("Hm, hm", END))
    assert isinstance(last, Delta)
    assert last.usage is not None
    assert last.usage.reasoning_tokens == USAGE["completion_tokens"]


@pytest.mark.parametrize(
    ("text", "tokens"), [(REASONING + "</think>Yes", 1), (" the the</think>Yes", 2), ("</think>Yes", 0)]
)
async def test_reasoning_is_counted_without_its_marks(tmp_path: Path, text: str, tokens: int) -> None:
    dialect = reasoning(tmp_path)
    assert dialect.prepare is not None
    answer = dialect.decoder(await dialect.prepare(generation(), NO_FORMAT), NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    (last,) = answer.decode(response(text, END))
    assert isinstance(last, Delta)
    assert last.usage is not None
    assert last.usage.reasoning_tokens == tokens


@pytest.mark.parametrize("single", [False, True])
async def test_an_answer_ends_with_its_only_call(dialect: Dialect, *, single: bool) -> None:
    assert dialect.prepare is not None
    tools = tuple(replace(each, strict=False) for each in TOOLS)
    prompt = replace(TALK, offer=ToolOffer(tools=tools, single=single))
    answer = dialect.decoder(await dialect.prepare(generation(prompt), NO_FORMAT), NO_FORMAT)
    answer.decode(response(meta=ACCEPTED))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    (last,) = answer.decode(response(2 * call, END | {"finish_reason": "length"}))
    assert isinstance(last, Delta)
    assert [each.name for each in last.calls] == (["now"] if single else ["now", "now"])
    assert last.finish_reason == ("tool_calls" if single else "length")


def test_without_a_tokenizer_a_conversation_is_refused_by_what_to_set() -> None:
    dialect = Dialects().of("m", having(CHATGLM.inputs))
    assert dialect is CHATGLM
    assert dialect.channels is not None
    tool = Tool(name="now", description=None, parameters={})
    offered = generation(replace(TALK, offer=ToolOffer(tools=(tool,))))
    for request in (generation(), offered):
        with pytest.raises(InvalidRequestError, match="set `tokenizers`"):
            dialect.request(request, NO_FORMAT, 5.0)
        for decoder in (dialect.decoder, dialect.channels.decoder):
            with pytest.raises(InvalidRequestError, match="set `tokenizers`"):
                decoder(request, NO_FORMAT)


async def test_only_answers_to_conversations_are_read(dialect: Dialect) -> None:
    assert dialect.prepare is not None
    for prompt, converses in ((TALK, True), (PlainText(text="the"), False)):
        prepared = (await dialect.prepare(generation(prompt), NO_FORMAT)).prompt
        assert isinstance(prepared, RenderedPrompt)
        assert prepared.converses == converses


async def test_a_model_without_a_template_continues_texts_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    dialect = Dialects([f"m={tmp_path}"]).of("m", having(CHATGLM.inputs))
    text = await sent(dialect, generation(PlainText(text="the")), NO_FORMAT)
    assert text.prompt_token_ids == [257]
    with pytest.raises(InvalidRequestError, match="no chat template of this model: use completions"):
        await sent(dialect, generation(), NO_FORMAT)
