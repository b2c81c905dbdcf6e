import json

import pytest

from tests.triton_models.text.walks import Walker
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar

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


@pytest.fixture(scope="module")
def walker(tokenizers: dict[str, Tokenizer]) -> Walker:
    return Walker(tokenizers["chatglm3"], "chatglm3")


@pytest.mark.parametrize("text", ODD)
def test_any_character_may_be_part_of_a_choice(walker: Walker, text: str) -> None:
    for choice in (text, f"x{text}y"):
        assert walker.walk("choice", json.dumps([choice])).text == choice


@pytest.mark.parametrize("name", ODD)
def test_any_character_may_be_part_of_a_property_and_a_constant(walker: Walker, name: str) -> None:
    parameters = {"type": "object", "properties": {name: {"const": name}}, "required": [name]}
    tools = [{"name": "f", "parameters": parameters, "strict": True}]
    rules = Grammar("tool_calls", json.dumps({"tools": tools, "required": True, "single": True}))
    walk = walker.walk("tool_calls", rules.text)
    assert walk.ended
    assert walk.text.count(json.dumps(name, ensure_ascii=False)[1:-1]) == 2
