from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.conversation import INSTRUCTION, chat_form, to_turns
from gateway.core.request import (
    Message,
    PastCall,
    Tool,
    ToolOffer,
)
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from wire.history import Turn

FORMATS = ("chatglm2", "chatglm3", "glm4")


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """The newest turn, and those before it."""

    prompt: str
    role: str
    history: list[Turn]


def to_history(said: Sequence[Message], chat_format: str, offer: ToolOffer | None = None) -> ChatInput:
    *earlier, newest = to_turns(said, chat_form(chat_format), offer)
    return ChatInput(prompt=newest.content, role=newest.role, history=earlier)


def messages(*said: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in said]


def named(said: Sequence[Message]) -> list[Message]:
    """Name each by its place, as errors do."""
    return [replace(message, field=f"messages.{at}") for at, message in enumerate(said)]


def turns(*said: tuple[str, str]) -> list[Turn]:
    return [Turn(role, content) for role, content in said]


@pytest.mark.parametrize("chat_format", FORMATS)
def test_one_question(chat_format: str) -> None:
    assert to_history(messages(("user", "hi")), chat_format) == ChatInput(
        prompt="hi", role="user", history=[]
    )


@pytest.mark.parametrize("chat_format", FORMATS)
def test_a_conversation_in_turns(chat_format: str) -> None:
    said = (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    asked = to_history(messages(*said), chat_format)
    assert asked == ChatInput(prompt="c", role="user", history=turns(*said[:3]))


@pytest.mark.parametrize("chat_format", FORMATS)
def test_system_messages_join_into_the_first_turn(chat_format: str) -> None:
    said = messages(("user", "a"), ("system", "s"), ("assistant", "b"), ("user", "c"), ("system", "t"))
    asked = to_history(said, chat_format)
    assert asked.history == turns(("system", "s\n\nt"), ("user", "a"), ("assistant", "b"))
    assert (asked.prompt, asked.role) == ("c", "user")


@pytest.mark.parametrize("chat_format", FORMATS)
def test_only_system_messages(chat_format: str) -> None:
    asked = to_history(messages(("system", "s"), ("system", "t")), chat_format)
    assert asked == ChatInput(prompt="s\n\nt", role="system", history=[])


def test_messages_in_a_row_join_for_chatglm2() -> None:
    said = messages(
        ("user", "a"),
        ("system", "s"),
        ("user", "b"),
        ("assistant", "c"),
        ("assistant", "d"),
        ("user", "e"),
        ("user", "f"),
    )
    asked = to_history(said, "chatglm2")
    assert asked.history == turns(("system", "s"), ("user", "a\n\nb"), ("assistant", "c\n\nd"))
    assert (asked.prompt, asked.role) == ("e\n\nf", "user")


def test_messages_in_a_row_stay_apart_for_chatglm3() -> None:
    said = (("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    assert to_history(messages(*said), "chatglm3").history == turns(*said[:-1])


def test_an_empty_message_adds_no_blank_line_but_is_a_turn() -> None:
    said = messages(("system", ""), ("system", "s"), ("user", ""), ("user", "a"))
    assert to_history(said, "chatglm2") == ChatInput(prompt="a", role="user", history=turns(("system", "s")))
    assert to_history(said, "chatglm3").history == turns(("system", "s"), ("user", ""))
    assert to_history(messages(("user", "")), "chatglm2").prompt == ""


@pytest.mark.parametrize("chat_format", FORMATS)
def test_a_greeting_comes_first(chat_format: str) -> None:
    asked = to_history(messages(("assistant", "hello"), ("user", "a")), chat_format)
    assert asked == ChatInput(prompt="a", role="user", history=turns(("assistant", "hello")))


def test_a_conversation_that_ends_with_an_answer_is_chatglm3s_alone() -> None:
    said = messages(("user", "a"), ("assistant", "b"))
    assert to_history(said, "chatglm3") == ChatInput(
        prompt="b", role="assistant", history=turns(("user", "a"))
    )
    with pytest.raises(InvalidRequestError, match="ends with a question") as refused:
        to_history(named([*messages(("system", "s")), *said, *messages(("system", "t"))]), "chatglm2")
    assert refused.value.param == "messages.2"


@pytest.mark.parametrize(
    ("chat_format", "why"), [("chatglm2", "has no tools"), ("chatglm3", "must answer a call")]
)
def test_a_tool_message_without_a_call_is_refused(chat_format: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as refused:
        to_history(named(messages(("user", "a"), ("tool", "21"), ("user", "b"))), chat_format)
    assert refused.value.param == "messages.1"


def test_an_unknown_format_is_the_upstreams_fault() -> None:
    with pytest.raises(UpstreamProtocolError, match="'glm5'"):
        to_history(messages(("user", "a")), "glm5")


@given(
    st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=8),
    st.sampled_from(FORMATS),
)
def test_no_message_is_ever_dropped(roles: list[str], chat_format: str) -> None:
    said = messages(*((role, f"<{number}>") for number, role in enumerate(roles)))
    try:
        asked = to_history(said, chat_format)
    except InvalidRequestError:
        assert chat_format == "chatglm2"
        assert [role for role in roles if role != "system"][-1] == "assistant"
        return
    rendered = [*asked.history, Turn(asked.role, asked.prompt)]
    for role in ("system", "user", "assistant"):
        contents = [message.content for message in said if message.role == role]
        kept = [part for turn in rendered if turn.role == role for part in turn.content.split("\n\n")]
        assert kept == contents
    assert [turn.role for turn in rendered].count("system") <= 1
    assert "system" not in [turn.role for turn in rendered[1:]]


WEATHER = Tool(name="get_weather", description="Tells it.", parameters={"type": "object"})
OFFER = ToolOffer(tools=(WEATHER, Tool(name="now", description=None, parameters={})))
DOCUMENTS = [
    {"name": "get_weather", "description": "Tells it.", "parameters": {"type": "object"}},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
ASKED = Message(role="user", content="?")
BOTH = Message(
    role="assistant",
    content="Let me see.",
    calls=(
        PastCall(id="a", name="get_weather", arguments='{"city": "北京"}'),
        PastCall(id="b", name="now", arguments="{}"),
    ),
)


def result(call: str, content: str) -> Message:
    return Message(role="tool", content=content, answers=call)


def test_tools_stand_in_the_system_turn_behind_the_trained_words() -> None:
    assert to_history([ASKED], "chatglm3", OFFER).history == [Turn("system", INSTRUCTION, tools=DOCUMENTS)]
    kind = to_history([*messages(("system", "Be kind.")), ASKED], "chatglm3", OFFER)
    assert kind.history == [Turn("system", f"Be kind.\n\n{INSTRUCTION}", tools=DOCUMENTS)]
    twice = to_history([*messages(("system", INSTRUCTION)), ASKED], "chatglm3", OFFER)
    assert twice.history[0].content == INSTRUCTION


def test_calls_and_results_are_turns_in_the_order_of_the_calls() -> None:
    said = [ASKED, BOTH, result("b", "noon"), result("a", "warm")]
    expected = [
        Turn("user", "?"),
        Turn("assistant", "Let me see."),
        Turn("assistant", "```python\ntool_call(city='北京')\n```", metadata="get_weather"),
        Turn("assistant", "```python\ntool_call()\n```", metadata="now"),
        Turn("observation", "warm"),
    ]
    assert to_history(said, "chatglm3") == ChatInput(prompt="noon", role="observation", history=expected)
    later = to_history([*said, ASKED], "chatglm3", OFFER)
    assert later.history[1:] == [*expected, Turn("observation", "noon")]


def test_glm_4_words_its_tools_itself_and_calls_with_json() -> None:
    assert to_history([ASKED], "glm4", OFFER).history == [Turn("system", "", tools=DOCUMENTS)]
    kind = to_history([*messages(("system", "Be kind.")), ASKED], "glm4", OFFER)
    assert kind.history == [Turn("system", "Be kind.", tools=DOCUMENTS)]
    asked = to_history([ASKED, BOTH, result("a", "warm"), result("b", "noon")], "glm4")
    assert asked.history[1:] == [
        Turn("assistant", "Let me see."),
        Turn("assistant", '{"city": "北京"}', metadata="get_weather"),
        Turn("assistant", "{}", metadata="now"),
        Turn("observation", "warm"),
    ]


@pytest.mark.parametrize(
    ("said", "at"),
    [
        ([ASKED, BOTH], 1),
        ([ASKED, BOTH, result("a", "x")], 1),
        ([ASKED, BOTH, result("a", "x"), ASKED], 1),
        ([ASKED, BOTH, result("c", "x")], 2),
        ([ASKED, BOTH, result("a", "x"), result("a", "x")], 3),
        ([ASKED, BOTH, result("a", "x"), result("b", "x"), ASKED, result("a", "x")], 5),
    ],
)
def test_calls_and_results_belong_together(said: list[Message], at: int) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        to_history(named(said), "chatglm3")
    assert refused.value.param == f"messages.{at}"


def test_chatglm2_has_no_tools() -> None:
    with pytest.raises(InvalidRequestError, match="trained without tools") as refused:
        to_history([ASKED], "chatglm2", OFFER)
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequestError, match="no tools") as refused:
        to_history(named([ASKED, BOTH, result("a", "x")]), "chatglm2")
    assert refused.value.param == "messages.1"


def test_tools_need_somebody_to_use_them_for() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        to_history(named(messages(("system", "s"))), "chatglm3", OFFER)
    assert refused.value.param == "messages.0"
