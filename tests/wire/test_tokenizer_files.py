import json
from typing import Any

import pytest

from wire.tokenizer_files import with_added_tokens

DOCUMENT = json.dumps({"added_tokens": [{"id": 7, "content": "<a>"}], "model": {"vocab": {"é": 0}}})


@pytest.mark.parametrize(
    "listed",
    [
        None,
        "all",
        [],
        {},
        {"7": {"content": "<a>"}},
        {"x": {"content": "<b>"}},
        {"8": "<b>"},
        {"8": {"content": 5}},
        {"-8": {"content": "<b>"}},
    ],
)
def test_nothing_is_added_where_nothing_is_missing(listed: Any) -> None:
    assert with_added_tokens(DOCUMENT, {"added_tokens_decoder": listed}, {7}) is DOCUMENT
    assert with_added_tokens(DOCUMENT, {}, {7}) is DOCUMENT


def test_what_is_missing_is_added_in_the_order_of_ids_and_the_rest_stays() -> None:
    listed = {
        "9": {"content": "<c>", "special": True},
        "8": {"content": "<b>", "lstrip": True},
        "7": {"content": "<other>"},
    }
    completed = json.loads(with_added_tokens(DOCUMENT, {"added_tokens_decoder": listed}, {7}))
    first, *added = completed["added_tokens"]
    assert first == {"id": 7, "content": "<a>"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    assert added == [
        {"id": 8, "content": "<b>", "normalized": True, "special": False, **flags, "lstrip": True},
        {"id": 9, "content": "<c>", "normalized": False, "special": True, **flags},
    ]
    assert completed["model"] == {"vocab": {"é": 0}}
