"""What a model's tokenizer and template make of a prompt, and that a long one holds nobody up."""

import asyncio
import io
import json
import threading
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from gateway.chat.guards import GUARD
from gateway.chat.marked import THINK
from gateway.chat.styles import STYLES
from gateway.chat.templates import ChatTemplate
from gateway.chat.vocabulary import Vocabulary
from gateway.core.events import Delta
from gateway.core.request import (
    Conversation,
    Generation,
    Grammar,
    Image,
    Message,
    PlainText,
    Tool,
    ToolOffer,
)
from gateway.core.upstream import Tokenization
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects import llm_api, model_text, trtllm, vllm
from gateway.triton.dialects.base import Dialect, ModelReport
from gateway.triton.dialects.foreign import Contract
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt, text_of_archive
from gateway.triton.dialects.text_answer import News, TextAnswer
from tests import template_checkpoint
from tests.e2e.foreign_server import write_tokenizer
from tests.gateway.triton.dialects.test_text_answer import by_character

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think></think>{% endif %}"
)
WEATHER = Tool(name="weather", description=None, parameters={})


def model(template: str = TEMPLATE) -> ModelText:
    return ModelText(ChatTemplate({"default": template}, {}), by_character(), STYLES["hermes"], thinks=True)


def talk(text: str = "Hi", **changes: object) -> Conversation:
    return replace(Conversation((Message(role="user", content=text),)), **changes)


def test_a_beginning_that_the_backend_adds_is_not_in_the_prompt() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "Hi": 1, "?": 2}, unk_token="?"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = ChatTemplate({"default": "<s>{{ messages[0].content }}"}, {})
    rendered = ModelText(template, Vocabulary(tokenizer)).render(talk(), count=True)
    assert (rendered.text, rendered.tokens) == ("Hi", 2)


@pytest.mark.parametrize(("switch", "thinking"), [({}, False), ({"enable_thinking": True}, True)])
def test_a_prompt_may_end_within_the_reasoning(switch: dict[str, bool], *, thinking: bool) -> None:
    rendered = model().render(talk(switches=switch))
    assert (rendered.thinks, rendered.thinking) == (True, thinking)
    assert not model().render(talk(switches={"enable_thinking": False})).thinking
    assert not model().render(PlainText("Hi" + THINK)).thinks


def test_what_is_looked_for_in_the_answer() -> None:
    offer = ToolOffer(tools=(WEATHER,))
    assert model().render(talk(offer=offer)).tools == ("weather",)
    assert model().render(talk(offer=replace(offer, choice="none"))).tools == ()
    assert model().render(talk(), count=True) == RenderedPrompt("Hi", 2, thinks=True, converses=True)


@pytest.mark.parametrize("exact", [False, True])
def test_tokens_of_a_conversation_end_where_no_answer_begins_if_asked(*, exact: bool) -> None:
    whole = model("{{ messages[0].content }}{% if add_generation_prompt %}: {% endif %}")
    asked = Tokenization(request_id="r", model="m", prompt=talk(), deadline=0)
    assert [
        len(whole.tokens(each, exact=exact).ids)
        for each in (asked, structs.replace(asked, answer_next=False))
    ] == [4, 2]


@pytest.mark.parametrize("special", [set(), {"<tool_call>"}, {"</think>"}, {"<pad>"}])
async def test_special_tokens_that_mark_something_are_not_left_out(special: set[str]) -> None:
    """As of Mistral's models: without them, nothing would tell a call from text."""
    marked = replace(model(), special=frozenset(special))
    prompt = talk(offer=ToolOffer(tools=(WEATHER,)))
    assert marked.render(prompt).show_special == bool(special - {"<pad>"})
    assert marked.render(talk()).show_special == (special == {"</think>"})
    prepare = vllm.CONTRACT.dialect(frozenset(), marked).prepare
    assert prepare is not None
    prepared = await prepare(generation(prompt), ModelReport())
    assert prepared.show_special == bool(special - {"<pad>"})


@pytest.mark.parametrize("contract", [trtllm.CONTRACT, llm_api.CONTRACT])
async def test_calls_and_reasoning_whose_marks_the_backend_hides(contract: Contract) -> None:
    """Its answer is text then, and a call in it would be, too: tools are refused."""
    special = frozenset({"[TOOL_CALLS]", "[THINK]", "[/THINK]"})
    template = "{{ messages[0].content }}{% if enable_thinking %}[THINK]{% endif %}"
    whole = replace(model(template), style=STYLES["mistral"], marks=("[THINK]", "[/THINK]"))
    prompt = talk(switches={"enable_thinking": True})
    offered = replace(prompt, offer=ToolOffer(tools=(WEATHER,), field="tools"))
    for seen, hides in ((whole, False), (replace(whole, special=special), True)):
        prepare = contract.dialect(frozenset(), seen).prepare
        assert prepare is not None
        rendered = (await prepare(generation(prompt), ModelReport())).prompt
        assert isinstance(rendered, RenderedPrompt)
        assert (rendered.thinks, rendered.thinking, rendered.show_special) == (not hides, not hides, False)
        if not hides:
            assert (await prepare(generation(offered), ModelReport())).prompt
            continue
        with pytest.raises(InvalidRequestError, match="Special tokens mark") as refused:
            await prepare(generation(offered), ModelReport())
        assert refused.value.param == "tools"


class _Waiting(ModelText):
    """Counts a long prompt only once that was allowed."""

    allowed = threading.Event()

    def count_prompt(self, text: str) -> int:
        assert len(text) < 100_000 or self.allowed.wait(60)
        return len(text)


def generation(prompt: Conversation) -> Generation:
    return Generation(request_id="r", model="m", prompt=prompt, deadline=0)


async def test_a_long_prompt_holds_nobody_up() -> None:
    """It is not ready before the others are, which it would be for ever if they waited for it."""
    held = _Waiting(ChatTemplate({"default": TEMPLATE}, {}), by_character())
    prepare = trtllm.CONTRACT.dialect(frozenset({"text_input", "max_tokens"}), held).prepare
    assert prepare is not None
    long: asyncio.Task[Any] = asyncio.create_task(prepare(generation(talk("x" * 1_000_000)), ModelReport()))
    await asyncio.sleep(0)
    for text in ("short", "y" * 50_000):
        assert (await prepare(generation(talk(text)), ModelReport())).prompt == RenderedPrompt(
            text, len(text), converses=True
        )
    assert not long.done()
    _Waiting.allowed.set()
    assert (await long).prompt == RenderedPrompt("x" * 1_000_000, 1_000_000, converses=True)


async def test_a_prompt_is_rendered_once_and_counted_where_the_backend_does_not() -> None:
    made: list[bool] = []

    class Counting(ModelText):
        def count_prompt(self, text: str) -> int:
            made.append(True)
            return len(text)

    counting = Counting(ChatTemplate({"default": TEMPLATE}, {}), by_character())
    for inputs, counts in (({"text_input", "max_tokens"}, 1), ({"return_num_input_tokens"}, 0)):
        made.clear()
        dialect = trtllm.CONTRACT.dialect(frozenset(inputs), counting)
        assert dialect.prepare is not None
        prepared = await dialect.prepare(generation(talk()), ModelReport())
        dialect.request(prepared, ModelReport(), 1.0)
        dialect.decoder(prepared, ModelReport())
        assert len(made) == counts


def test_the_report_tells_what_the_template_reads() -> None:
    dialect = trtllm.CONTRACT.dialect(frozenset({"text_input", "max_tokens"}), model())
    assert dialect.report.template_reads == {"messages", "enable_thinking"}


async def test_only_a_model_with_an_input_for_images_gets_them() -> None:
    written = "{{ '*' if part.type == 'image' else part.text }}"
    seeing = model("{% for part in messages[0].content %}" + written + "{% endfor %}")
    image = Image(url="data:image/png;base64,eA==", at=1, field="f")
    prompt = Conversation((Message(role="user", content="ab", images=(image,)),))
    inputs = frozenset({"text_input", "sampling_parameters", "image"})
    dialect = vllm.CONTRACT.dialect(inputs, seeing)
    assert dialect.prepare is not None
    prepared = await dialect.prepare(generation(prompt), ModelReport())
    request = dialect.request(prepared, ModelReport(), 1.0)
    given = {each.name: raw for each, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
    assert given["text_input"].endswith(b"a*b")
    assert given["image"].endswith(b"eA==")
    for contract, has in ((vllm.CONTRACT, inputs - {"image"}), (trtllm.CONTRACT, inputs)):
        prepare = contract.dialect(has, seeing).prepare
        assert prepare is not None
        with pytest.raises(InvalidRequestError) as refused:
            await prepare(generation(prompt), ModelReport())
        assert refused.value.param == "f"
    count = dialect.tokens
    assert count is not None
    asked = Tokenization(request_id="r", model="m", prompt=prompt, deadline=0.0)
    with pytest.raises(InvalidRequestError) as refused:
        count(asked)
    assert refused.value.param == "f"


async def structural_tag_of(dialect: Dialect, asked: Generation) -> Any:
    """Return what vLLM is told to hold an answer to, and nothing beside it."""
    assert dialect.prepare is not None
    request = dialect.request(await dialect.prepare(asked, ModelReport()), ModelReport(), 1.0)
    given = {each.name: raw for each, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
    structured = json.loads(json.loads(given["sampling_parameters"][4:])["guided_decoding"])
    assert structured.keys() == {"structural_tag"}
    return json.loads(structured["structural_tag"])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("switch", [None, {}, {"enable_thinking": True}, {"enable_thinking": False}])
async def test_what_holds_calls_among_text_to_schemas(style: str, switch: dict[str, bool] | None) -> None:
    written = replace(model(), style=STYLES[style], thinks=switch is not None)
    strict = ToolOffer(tools=(replace(WEATHER, strict=True), replace(WEATHER, name="time")), field="tools")
    dialect = vllm.CONTRACT.dialect(frozenset({"text_input", "sampling_parameters"}), written)
    assert dialect.prepare is not None
    asked = generation(talk(offer=strict, switches=switch or {}))
    if style not in {"hermes", "qwen3coder", "glm45"}:
        with pytest.raises(InvalidRequestError, match="leave out 'strict'") as refused:
            await dialect.prepare(asked, ModelReport())
        assert refused.value.param == "tools"
        return
    tag = await structural_tag_of(dialect, asked)
    # What begins as reasoning is read as such also where the prompt has ended it.
    may_reason = switch is not None and (style != "hermes" or switch != {"enable_thinking": False})
    assert ("structures" in tag) == (style == "hermes" and not may_reason)
    assert ("</think>" in str(tag)) == may_reason
    assert ("'optional'" in str(tag)) == (may_reason and switch != {"enable_thinking": True})
    assert all(name in str(tag) for name in ("weather", "time"))


async def test_a_schema_that_no_tag_enforces_is_named() -> None:
    written = replace(model("{{ messages[0].content }}"), style=STYLES["glm45"])
    schema = {"properties": {"a": {"type": "string", "maxLength": 3}}}
    tools = (
        replace(WEATHER, strict=True),
        Tool(name="x", description=None, parameters=schema, strict=True, place=7),
    )
    prepare = vllm.CONTRACT.dialect(frozenset(), written).prepare
    assert prepare is not None
    with pytest.raises(InvalidRequestError, match="'maxLength' of 'a'") as refused:
        await prepare(generation(talk(offer=ToolOffer(tools=tools))), ModelReport())
    assert refused.value.param == "tools.7.function.parameters"


@pytest.mark.parametrize("style", ["hermes", "qwen3coder", "glm45"])
async def test_no_tag_is_made_of_special_tokens(style: str) -> None:
    special = frozenset({"<tool_call>", "</tool_call>"})
    written = replace(model("{{ messages[0].content }}"), style=STYLES[style], special=special)
    strict = ToolOffer(tools=(replace(WEATHER, strict=True),), field="tools")
    prepare = vllm.CONTRACT.dialect(frozenset(), written).prepare
    assert prepare is not None
    with pytest.raises(InvalidRequestError, match="leave out 'strict'"):
        await prepare(generation(talk(offer=strict)), ModelReport())


@pytest.mark.parametrize("exact", [False, True])
def test_a_conversation_is_also_counted_up_to_where_the_answer_begins(exact: bool) -> None:
    text = model("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}")
    asked = Tokenization(request_id="r", model="m", prompt=talk(), deadline=0.0)
    assert len(text.tokens(asked, exact=exact).ids) == len("Hi>")
    asked = structs.replace(asked, answer_next=False)
    assert len(text.tokens(asked, exact=exact).ids) == len("Hi")


def test_the_parameters_that_are_strings_are_known() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["string", "null"]},
        "c": {"type": "integer"},
        "d": True,
        "e": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "f": {"type": ["string", "integer"]},
        "g": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/G"}]},
        "h": {"type": "null"},
        "i": {"enum": ["1", "2"]},
        "j": {"const": "3"},
        "k": {"enum": ["1", 1]},
        "l": {"const": 3},
    }
    strings = {"a": False, "b": True, "e": True, "i": False, "j": False}
    tools = (replace(WEATHER, parameters={"properties": properties}), replace(WEATHER, name="time"))
    assert model().render(talk(offer=ToolOffer(tools=tools))).strings == {"weather": strings, "time": {}}


def test_a_template_gives_away_how_reasoning_is_marked(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    for closing, marks in (("</think>", ("<think>", "</think>")), ("[/THINK]", ("[THINK]", "[/THINK]"))):
        template.write_text("{# " + closing + " #}{{ messages[0].content }}" + f"{{{{ '{marks[0]}' }}}}")
        found = ModelText.read(tmp_path / "tokenizer")
        assert (found.thinks, found.marks) == (True, marks)
        rendered = found.render(talk())
        assert rendered.thinking
        generation = Generation(request_id="r", model="m", prompt=rendered, deadline=0)
        reader = TextAnswer(generation, found, rendered, cut_stops=False, limit=None)
        events = reader.take(News(text=f"Hm.{closing}Two."))
        (delta,) = [event for event in events if isinstance(event, Delta)]
        assert (delta.reasoning, delta.text) == ("Hm.", "Two.")
    template.write_text("{{ messages[0].content }}")
    assert not ModelText.read(tmp_path / "tokenizer").thinks


def archive(files: Mapping[str, str | bytes | None]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files.items():
            if text is not None:
                made.writestr(name, text)
    return written.getvalue()


def test_an_archive_is_read_as_its_folder_is(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    files = {each.name: each.read_text() for each in (tmp_path / "tokenizer").iterdir()}
    files["chat_template.jinja"] = "{{ messages[0].content }}!"
    files["generation_config.json"] = '{"eos_token_id": [5, 6]}'
    packed = archive(files)  # once: it holds the time, by which another one would differ
    found = text_of_archive(packed)
    assert found.text(talk()) == "Hi!"
    assert found.required_vocabulary().ends[-2:] == (5, 6)
    assert text_of_archive(packed) is found  # another replica's


def test_replicas_that_come_together_have_their_archive_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    files = {each.name: each.read_text() for each in (tmp_path / "tokenizer").iterdir()}
    sent = archive(files | {"generation_config.json": '{"eos_token_id": 7}'})
    read, together = ModelText.read, threading.Barrier(4)
    reads = []

    def slow(folder: Any) -> ModelText:
        reads.append(folder)
        time.sleep(0.1)
        return read(folder)

    def ask() -> ModelText:
        together.wait()
        return text_of_archive(sent)

    monkeypatch.setattr(ModelText, "read", slow)
    with ThreadPoolExecutor(4) as pool:
        found = [asked.result() for asked in [pool.submit(ask) for _ in range(4)]]
    assert len(reads) == 1
    assert all(each is found[0] for each in found)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tokenizer.json": "{}"}, "the archive/tokenizer.json is not a tokenizer"),
        ({"tokenizer_config.json": "["}, "the archive/tokenizer_config.json cannot be read"),
        ({"chat_template.jinja": "{% if %}"}, "not valid Jinja"),
        ({"chat_template.jinja": b"\xff"}, "UnicodeDecodeError"),
        (
            {"chat_template.jinja": None, "tokenizer_config.json": '{"chat_template": [{}]}'},
            "KeyError: 'name'",
        ),
        ({"generation_config.json": " " * 2**20}, "files have .* bytes"),
    ],
)
def test_an_archive_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | bytes | None], why: str
) -> None:
    monkeypatch.setattr(model_text, "_ARCHIVE_BYTES", 2**20)
    write_tokenizer(tmp_path / "tokenizer")
    files = {each.name: each.read_text() for each in (tmp_path / "tokenizer").iterdir()}
    with pytest.raises(UpstreamProtocolError, match=why):
        text_of_archive(archive(files | changed))
    del files["tokenizer.json"]
    with pytest.raises(UpstreamProtocolError, match=r"has no tokenizer\.json"):
        text_of_archive(archive(files))


CONTRACTS = {
    "vllm": (vllm.CONTRACT, {"text_input", "sampling_parameters", "stream", "exclude_input_in_output"}),
    "trtllm": (trtllm.CONTRACT, {"text_input", "max_tokens", "stream", "exclude_input_in_output"}),
}


@pytest.mark.parametrize("backend", CONTRACTS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"switches": {"enable_thinking": True}}, "begins with reasoning"),
        ({"offer": ToolOffer(tools=(WEATHER,))}, "would forbid calling a tool"),
        ({"offer": ToolOffer(tools=(WEATHER,), choice="none")}, None),
        ({}, None),
    ],
)
async def test_a_grammar_excludes_reasoning_and_calls(
    backend: str, changes: dict[str, Any], reason: str | None
) -> None:
    contract, inputs = CONTRACTS[backend]
    dialect = contract.dialect(contract.inputs | inputs, model())
    grammar = Grammar(kind="json_object", field="text.format")
    asked = Generation(request_id="r", model="m", prompt=talk(**changes), deadline=0, grammar=grammar)
    assert dialect.prepare is not None
    if reason is None or (backend, reason) == ("vllm", "begins with reasoning"):
        assert (await dialect.prepare(asked, ModelReport())).grammar == grammar
        return
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        await dialect.prepare(asked, ModelReport())
    assert refused.value.param == "text.format"
    assert await dialect.prepare(structs.replace(asked, grammar=None), ModelReport())


@pytest.mark.parametrize(
    ("kind", "text", "format_"),
    [
        ("json_object", "", {"type": "json_schema", "json_schema": {"type": "object"}}),
        ("json_schema", '{"type": "array"}', {"type": "json_schema", "json_schema": {"type": "array"}}),
        ("regex", "a+", {"type": "regex", "pattern": "a+"}),
        ("choice", '["a"]', {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}),
        ("lark", 'start: "a"', None),
        (None, "", "minItems"),
    ],
)
async def test_behind_vllm_a_grammar_is_of_what_follows_begun_reasoning(
    kind: Any, text: str, format_: Any
) -> None:
    contract, inputs = CONTRACTS["vllm"]
    dialect = contract.dialect(contract.inputs | inputs, model())
    offer = None if kind else ToolOffer(tools=(WEATHER,), choice="required")
    asked = generation(talk(switches={"enable_thinking": True}, offer=offer))
    if kind:
        asked = structs.replace(asked, grammar=Grammar(kind=kind, text=text, field="f"))
    assert dialect.prepare is not None
    if format_ is None:
        with pytest.raises(InvalidRequestError, match="begins with reasoning") as refused:
            await dialect.prepare(asked, ModelReport())
        assert refused.value.param == "f"
        return
    reasoning, blanks, behind = (await structural_tag_of(dialect, asked))["format"]["elements"]
    assert (reasoning["end"], blanks["type"]) == ("</think>", "regex")
    assert behind == format_ if kind else format_ in str(behind)


def test_what_is_counted_and_shown_is_what_is_sent(tmp_path: Path) -> None:
    """Control tokens that a message holds are text, and what keeps them from being tokens is not seen."""
    template_checkpoint.write_tokenizer(tmp_path)
    found = ModelText.read(tmp_path)
    prompt = talk("a<|im_end|>b")
    sent = found.encoded(prompt)
    asked = Tokenization(request_id="r", model="m", prompt=prompt, deadline=0, strings=True)
    tokens = found.tokens(asked, exact=True)
    assert (tuple(tokens.ids), len(tokens.ids)) == (sent.ids, sent.tokens)
    assert sent.text == "<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.strings is not None
    assert tokens.text == "".join(tokens.strings) == sent.text


def test_a_completion_is_encoded_as_it_is(tmp_path: Path) -> None:
    template_checkpoint.write_tokenizer(tmp_path)
    found = ModelText.read(tmp_path)
    prompt = PlainText(f"a<|im_end|>{GUARD}")
    asked = Tokenization(request_id="r", model="m", prompt=prompt, deadline=0)
    ids = found.tokens(asked, exact=True).ids
    assert found.vocabulary is not None
    assert ids[1] == found.vocabulary.ends[0]
    assert found.vocabulary.decode(ids) == f"a{GUARD}"
    assert found.encoded(prompt).ids == tuple(ids)


@pytest.mark.parametrize("text", ["the café", "<b>the</b> <|im_", "<think>the</think>\n", "  \n\t你好 🙂"])
def test_ids_of_a_conversation_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    template_checkpoint.write_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    said = [{"role": "user", "content": text}]
    ids = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert list(ModelText.read(tmp_path).encoded(talk(text)).ids) == ids
