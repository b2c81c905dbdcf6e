"""`allowed_token_ids`, `bad_words` and `truncate_prompt_tokens`, from the request to its responses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.triton_models.serving.conftest import Served
from triton_models.errors import InvalidRequestError, TokenMaskError
from triton_models.serving.chat_text import ChatText
from triton_models.serving.engine_requests import TokenLimits
from wire.grammar import Grammar
from wire.refusal import RefusalCode

FREE: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Only:
    """A grammar that allows its ids."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids
        self.accepted: list[int] = []

    def fill(self, words: torch.Tensor) -> None:
        for each in self.ids:
            words[each // 32] |= 1 << each % 32

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def forced(self) -> Sequence[int]:
        return self.ids if len(self.ids) == 1 else ()

    def takes(self, tokens: Sequence[int]) -> int:
        return next((at for at, token_id in enumerate(tokens) if token_id not in self.ids), len(tokens))

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        assert self.takes(tokens) == len(tokens)
        for row in rows:
            self.fill(row)


def allowed(mask: Any, vocabulary: int = 70) -> list[int]:
    words = torch.zeros(-(-vocabulary // 32), dtype=torch.int32)
    mask.fill(words)
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits)]


def test_only_allowed_ids_are_left_without_banned_ones() -> None:
    limits = TokenLimits([3, 31, 63, 69], [(63,), (5,)], 70)
    mask = limits.mask(None, stop_ids={2}, min_tokens=0)
    assert allowed(mask) == [3, 31, 69]
    mask.accept(3)
    assert allowed(mask) == [3, 31, 69]


def test_a_word_of_several_ids_loses_its_last_only_behind_the_others() -> None:
    limits = TokenLimits([1, 2, 31], [(1, 2, 31), (2, 2)], 70)
    mask, other = (limits.mask(None, stop_ids=(), min_tokens=0) for _ in range(2))
    assert allowed(mask) == [1, 2, 31]
    for token, left in ((1, [1, 2, 31]), (2, [1]), (1, [1, 2, 31]), (1, [1, 2, 31]), (2, [1])):
        mask.accept(token)
        assert allowed(mask) == left
    other.accept(2)
    assert allowed(other) == [1, 31]  # nothing of another choice counts, nor half of a word


def test_a_grammar_applies_as_well_and_hears_each_token() -> None:
    grammar = Only(3, 4)
    mask = TokenLimits(None, [(4,)], 70).mask(grammar, stop_ids=(), min_tokens=0)
    assert allowed(mask) == [3]
    mask.accept(3)
    assert grammar.accepted == [3]


@pytest.mark.parametrize("grammar", [None, Only(1, 2, 4, 31)])
def test_what_is_ahead_counts_as_if_it_was_told(grammar: Only | None) -> None:
    limits = TokenLimits([1, 2, 31], [(1, 2, 31), (2, 2)], 70)
    mask, told = (limits.mask(grammar, stop_ids=(), min_tokens=0) for _ in range(2))
    for mine in (mask, told):
        mine.accept(1)
    tokens = [2, 1, 2, 2, 31]
    assert mask.takes([*tokens, 9]) == (len(tokens) + 1 if grammar is None else len(tokens))
    rows = [torch.zeros(3, dtype=torch.int32) for _ in tokens]
    mask.fill_ahead(tokens, rows)
    for token_id, row in zip(tokens, rows, strict=True):
        told.accept(token_id)
        wanted = torch.zeros(3, dtype=torch.int32)
        told.fill(wanted)
        assert torch.equal(row, wanted)
    assert allowed(mask) == [1, 2, 31]
    assert mask.forced() == ()


def test_what_a_grammar_forces_is_forced_under_limits_too() -> None:
    assert TokenLimits([1], [], 70).mask(Only(1), stop_ids=(), min_tokens=0).forced() == (1,)


@pytest.mark.parametrize(
    ("ids", "banned", "grammar", "min_tokens"),
    [([3], [(3,)], None, 0), ([3], [], Only(4), 0), ([2], [], None, 1), ([2, 3], [(3,)], None, 1)],
)
def test_where_no_token_is_left_the_request_fails(
    ids: list[int], banned: list[tuple[int, ...]], grammar: Only | None, min_tokens: int
) -> None:
    mask = TokenLimits(ids, banned, 70).mask(grammar, stop_ids={2, 10**6}, min_tokens=min_tokens)
    with pytest.raises(TokenMaskError, match="allowed_token_ids and bad_words"):
        allowed(mask)


def test_stop_ids_count_from_the_least_number_of_tokens_on() -> None:
    mask = TokenLimits([2, 3], [(3, 3)], 70).mask(None, stop_ids={2}, min_tokens=1)
    assert allowed(mask) == [2, 3]  # the engine itself removes the stop id
    mask.accept(3)
    assert allowed(mask) == [2]


def test_ids_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        TokenLimits([70], [], 70)


def test_an_answer_has_allowed_ids_only(served: Served) -> None:
    free = served.ask(**FREE).wait()
    ids = sorted({free.token_ids[0] + 1, 40, 77})
    held = served.ask(**FREE | {"temperature": 2, "ignore_eos": False}, allowed_token_ids=ids, n=2).wait()
    assert set(held.token_ids) <= set(ids)
    # Stop ids are not allowed by themselves.
    assert held.metas[-1].finish_reason == "length"


def test_a_word_that_would_come_does_not(served: Served, text: ChatText) -> None:
    free = served.ask(**FREE).wait()
    tokenizer = text.tokenizer
    words = [token.strip() for token in (tokenizer.display(each)[0] for each in free.token_ids)]
    word = next(each for each in words if len(each) > 1 and each.isprintable() and "\\" not in each)
    held = served.ask(**FREE, bad_words=[word]).wait()
    assert word in free.text
    gone = {ids[0] for ids in (tokenizer.encode(word), tokenizer.encode("\n" + word)[2:]) if len(ids) == 1}
    assert gone
    assert gone & set(free.token_ids)
    assert not gone & set(held.token_ids)


def test_limits_and_a_grammar_hold_together(served: Served, text: ChatText) -> None:
    tokenizer = text.tokenizer
    of_b = [each for each in range(tokenizer.size) if set(tokenizer.display(each)[0].strip()) == {"b"}]
    asked = {"grammar": Grammar("regex", "[ab]{8}"), "temperature": 2, "n": 4, "seed": 3}
    held = served.ask(**asked, allowed_token_ids=[*of_b, *text.format.stop_ids]).wait()
    assert {text for text, meta in held.responses if meta.finish_reason} == {"b" * 8}
    free = served.ask(**asked).wait()
    assert any("a" in text for text, _ in free.responses)


def test_limits_that_contradict_the_grammar_are_the_requests_fault(served: Served) -> None:
    held = served.ask(grammar=Grammar("regex", "[ab]{8}"), allowed_token_ids=[5], max_tokens=20).wait()
    code, message = held.refused
    assert code is RefusalCode.INVALID_GRAMMAR
    assert "allowed_token_ids" in message


def test_limits_that_leave_nothing_are_named_where_there_is_no_grammar(
    served: Served, text: ChatText
) -> None:
    code, message = served.ask(allowed_token_ids=[text.tokenizer.eos_id], min_tokens=2).wait().refused
    assert code is RefusalCode.INVALID_GRAMMAR
    assert "allowed_token_ids" in message
    assert "grammar" not in message


def test_an_id_outside_the_vocabulary_is_refused_by_name(served: Served) -> None:
    for name in ("allowed_token_ids", "stop_token_ids"):
        refused = served.ask(**{name: [10**6]}, bad_words=["x"]).wait()
        assert refused.refused[0] is RefusalCode.INVALID_REQUEST
        assert name in refused.refused[1]


def test_the_prompts_last_tokens_are_kept(served: Served) -> None:
    asked = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    full = served.ask(**asked).wait()
    ids = full.prompt_token_ids
    cut = served.ask(**asked, truncate_prompt_tokens=3).wait()
    expected = served.ask("", **asked, prompt_token_ids=ids[-3:]).wait()
    assert cut.prompt_token_ids == ids[-3:]
    assert cut.metas[0].accepted.prompt_tokens == cut.metas[-1].usage.prompt_tokens == 3
    assert cut.token_ids == expected.token_ids
    for more in (len(ids), len(ids) + 1, -1):
        whole = served.ask(**asked, truncate_prompt_tokens=more).wait()
        assert whole.metas[0].accepted.prompt_token_ids == ids


def test_what_fits_the_context_is_kept(served: Served) -> None:
    context = served.probe().max_context
    ids = [5 + at % 60 for at in range(context + 20)]
    for max_tokens, kept in ((7, context - 7), (None, context - 1), (0, context - 1)):
        answer = served.ask(
            "",
            raw=True,
            prompt_token_ids=ids,
            truncate_prompt_tokens=-1,
            max_tokens=max_tokens,
            temperature=0,
        ).wait()
        assert answer.refusal is None
        assert answer.metas[-1].usage.prompt_tokens == kept
    # As the gateway's own limit, `max_tokens` yields to the prompt.
    answer = served.ask(
        "",
        raw=True,
        prompt_token_ids=ids,
        truncate_prompt_tokens=-1,
        max_tokens=context,
        max_total_tokens=context,
    ).wait()
    assert answer.metas[-1].usage.prompt_tokens == context - 1
    refused = served.ask("", raw=True, prompt_token_ids=ids, truncate_prompt_tokens=context).wait()
    assert refused.refused[0] is RefusalCode.CONTEXT_LENGTH_EXCEEDED


def test_a_text_that_cannot_fit_is_cut_too(served: Served) -> None:
    context = served.probe().max_context
    text = "hello " * (40 * context)
    assert served.ask(text).wait().refused[0] is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    answer = served.ask(text, truncate_prompt_tokens=-1, max_tokens=7).wait()
    assert answer.refusal is None
    assert answer.metas[-1].usage.prompt_tokens == context - 7


def test_only_what_is_kept_is_echoed_and_reported(served: Served, text: ChatText) -> None:
    prompt = "one two three four five"
    ids = text.tokenizer.encode(prompt)
    answer = served.ask(
        prompt, raw=True, echo=True, truncate_prompt_tokens=3, prompt_logprobs=0, max_tokens=0
    ).wait()
    told = [each for meta in answer.metas for each in meta.prompt_logprobs or []]
    assert [each.id for each in told] == ids[-3:]
    assert answer.text == text.tokenizer.decode(ids[-3:])
    assert b"".join(bytes(each.bytes) for each in told).decode() == answer.text
