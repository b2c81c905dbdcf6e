"""What a grammar's mask knows of tokens that it was not told yet."""

import json
from typing import Any

import pytest

from tests.triton_models.text.walks import Walker, Words
from triton_models.text.grammars import FORCED_BYTES
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "height": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
        "tags": {"type": "array", "items": {"enum": ["a b", "你", 3, None]}, "minItems": 1, "maxItems": 3},
        "home": {"type": "object", "properties": {"城": {"type": "string"}}, "required": ["城"]},
    },
    "required": ["name", "tags", "home"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["chatglm2", "chatglm3", "glm4"])
def walker(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Walker:
    return Walker(tokenizers[request.param], request.param)


@pytest.mark.parametrize("seed", range(6))
def test_a_mask_looks_ahead_as_it_goes_on_and_stays_where_it_is(walker: Walker, seed: int) -> None:
    walker.look_ahead(Grammar("json_schema", json.dumps(SCHEMA)), seed=seed)


def test_a_text_that_must_come_is_split_by_the_tokenizer_but_for_its_last_token(walker: Walker) -> None:
    tokenizer = walker.tokenizer
    mask = walker.grammars.compile(Grammar("regex", "(the name is Smith)|[0-9]+")).mask()
    assert mask.forced() == ()
    ids = tokenizer.encode("the name is Smith")
    mask.accept(ids[0])
    assert list(mask.forced()) == ids[1:-1]
    long = "北京 and 上海 " * 200
    ids = tokenizer.encode(long)
    mask = walker.grammars.compile(Grammar("choice", json.dumps([long]))).mask()
    forced = list(mask.forced())
    assert forced == ids[: len(forced)]
    assert 20 < len(forced) < FORCED_BYTES


def test_what_fails_while_it_looks_ahead_leaves_the_answer_as_it_is(walker: Walker) -> None:
    compiled = walker.grammars.compile(Grammar("choice", '["alpha beta gamma"]'))
    mask, ids = compiled.mask(), walker.tokenizer.encode("alpha beta gamma")
    rows = [Words(walker.tokenizer.size) for _ in range(2)]
    mask.fill_ahead([1, ids[0]], rows)
    assert not any(row.array.any() for row in rows)
    assert mask.scout.is_error()
    for at, token_id in enumerate(ids):
        assert not mask.forced()
        assert mask.takes(ids[at:]) == 0
        assert token_id in walker.allowed(mask)
        mask.accept(token_id)
    assert set(walker.allowed(mask)) == walker.format.stop_ids
