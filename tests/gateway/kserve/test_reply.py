import json

import pytest

from gateway.kserve.history import Reply, read_reply
from wire.history import Turn
from wire.meta import Segment

TOOLS = [Turn("system", "", tools=[{"name": "get_weather"}]), Turn("user", "?")]
FORMAT = "chatglm3"
CALL = "get_weather\n ```python\ntool_call(city='北京', days=(0, 3))\n```"


def test_text_is_cleaned() -> None:
    reply = read_reply("\n 我训练于[[训练时间]]。 \n", [], [Turn("user", "?")], FORMAT)
    assert reply == Reply("我训练于2023年。", (Turn("assistant", "我训练于2023年。"),))


def test_a_first_line_that_names_no_offered_tool_is_text() -> None:
    for conversation in ([], [Turn("system", "Be kind.")], TOOLS):
        assert read_reply("Well,\nyes", [], conversation, FORMAT).response == "Well,\nyes"
    assert read_reply(CALL, [], [], FORMAT).response == CALL.strip()


def test_a_tool_call_is_read_and_keeps_its_name_in_the_history() -> None:
    reply = read_reply(CALL, [], TOOLS, FORMAT)
    assert json.loads(reply.response) == {
        "name": "get_weather",
        "parameters": {"city": "北京", "days": [0, 3]},
    }
    assert "北京" in reply.response
    assert reply.turns == (Turn("assistant", CALL.partition("\n")[2], metadata="get_weather"),)


def test_text_before_a_call_is_a_turn_of_its_own() -> None:
    before = "\n我来查一下。"
    reply = read_reply(before + CALL, [Segment(len(before), "assistant")], TOOLS, FORMAT)
    assert [(turn.metadata, turn.content[:6]) for turn in reply.turns] == [
        ("", "我来查一下。"),
        ("get_weather", " ```py"),
    ]
    assert json.loads(reply.response)["name"] == "get_weather"
    after = read_reply(CALL + "\n晴", [Segment(len(CALL), "assistant")], TOOLS, FORMAT)
    assert after.response == "晴"
    assert len(after.turns) == 2


@pytest.mark.parametrize(
    "content",
    [
        "```python\ntool_call(city=open('/etc/passwd'))\n```",
        "```python\ntool_call('北京')\n```",
        "```python\ntool_call(**{1: 1})\n```",
        "```python\nimport os\n```",
        "```python\ntool_call(a={1, 2})\n```",
        "```python\ntool_call(a=" + "-" * 50_000 + "1)\n```",
        "no code",
    ],
)
def test_a_call_that_cannot_be_read_is_given_as_it_stands(content: str) -> None:
    reply = read_reply("get_weather\n" + content, [], TOOLS, FORMAT)
    assert json.loads(reply.response) == {"name": "get_weather", "content": content}


def test_code_for_the_interpreter_stays_code() -> None:
    reply = read_reply(
        "interpreter\n```python\nprint(1)\n```", [], [Turn("system", "You can run code.")], FORMAT
    )
    assert json.loads(reply.response) == {"name": "interpreter", "content": "```python\nprint(1)\n```"}


def test_glm_4_calls_with_json() -> None:
    reply = read_reply('get_weather\n{"city": "北京"}', [], TOOLS, "glm4")
    assert json.loads(reply.response) == {"name": "get_weather", "parameters": {"city": "北京"}}
    assert reply.turns == (Turn("assistant", '{"city": "北京"}', metadata="get_weather"),)
    fenced = read_reply(CALL, [], TOOLS, "glm4")
    assert json.loads(fenced.response) == {"name": "get_weather", "content": CALL.partition("\n")[2]}
