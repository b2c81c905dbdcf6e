"""What both sides read alike of a tokenizer's files (`wire.request.TokenizerFiles`)."""

import json
from collections.abc import Container, Mapping
from typing import Any, Final

_FLAGS: Final = ("single_word", "lstrip", "rstrip", "special")


def with_added_tokens(document: str, config: Mapping[str, Any], known: Container[int]) -> str:
    """Return the text of `tokenizer.json` with the tokens that only its configuration adds.

    As in transformers, their ids are by order: what the configuration calls 300 follows the others.

    Args:
        document: `tokenizer.json`, which could be read.
        config: `tokenizer_config.json`, of which `added_tokens_decoder` is read; what is no token in it is
            left out.
        known: the ids of the added tokens that `document` by itself comes to.
    """
    listed = config.get("added_tokens_decoder")
    named = {
        int(at): token
        for at, token in (listed.items() if isinstance(listed, dict) else ())
        if at.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    if all(at in known for at in named):
        return document
    tokenizer = json.loads(document)
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    for at, token in named.items():
        flags = {flag: token.get(flag) is True for flag in _FLAGS}
        normalized = token.get("normalized", not flags["special"]) is True
        added.setdefault(at, {"id": at, "content": token["content"], "normalized": normalized, **flags})
    tokenizer["added_tokens"] = [added[at] for at in sorted(added)]
    return json.dumps(tokenizer, ensure_ascii=False)
