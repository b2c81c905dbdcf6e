from typing import Any

import pytest

from tests.gateway.openai.test_response_builder import TOOLS, last, run


def test_what_the_request_said_is_repeated() -> None:
    _, response = run(
        last(),
        instructions="Be kind.",
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        tools=TOOLS,
        tool_choice={"type": "function", "name": "now"},
        parallel_tool_calls=False,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
    )
    repeated = {
        "model": "m",
        "instructions": "Be kind.",
        "max_output_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "tool_choice": {"type": "function", "name": "now"},
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert {name: response[name] for name in repeated} == repeated
    assert response["tools"] == [
        {**TOOLS[0], "strict": False},
        {**TOOLS[1], "strict": False, "description": None},
    ]


@pytest.mark.parametrize(
    ("asked", "repeated"),
    [
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "a", "schema": {"type": "null"}, "strict": None}},
            {
                "type": "json_schema",
                "name": "a",
                "description": None,
                "schema": {"type": "null"},
                "strict": True,
            },
        ),
    ],
)
def test_the_form_of_the_text_is_repeated(asked: Any, repeated: Any) -> None:
    _, response = run(last("stop", "null"), text=asked)
    assert response["text"] == {"format": repeated}


def test_what_the_request_left_open_is_told() -> None:
    _, response = run(last())
    told = {
        "object": "response",
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    assert {name: response[name] for name in told} == told
