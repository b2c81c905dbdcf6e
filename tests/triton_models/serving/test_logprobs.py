"""Log-probabilities of prompts, through the whole service."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.triton_models.serving.conftest import GOLDEN, Served
from tests.triton_models.serving.fakes import FakeResponder
from tests.triton_models.serving.told import told
from triton_models.engine.sequence import TokenLogprobs
from triton_models.serving.chat_text import ChatText
from triton_models.serving.request import RESPONSE_TOKENS, PromptReport
from wire.meta import Meta, PromptLogprob, encode_meta
from wire.refusal import RefusalCode
from wire.request import Generation

PROMPT = (
    "请介绍一下你自己，然后讲一个关于山里的小狐狸的故事，越长越好。Please be brief. The question is this."
)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "raw": True}


def reported(answer: FakeResponder, index: int = 0) -> list[PromptLogprob]:
    return [each for meta in answer.metas if meta.index == index for each in meta.prompt_logprobs or ()]


def ask(served: Served, prompt: str = PROMPT, **asked: Any) -> FakeResponder:
    answer = served.ask(prompt, **{**GREEDY, **asked}).wait()
    assert answer.refusal is None, answer.refusal
    return answer


@pytest.mark.parametrize("streamed", [False, True])
def test_each_choice_tells_the_whole_prompt(serve: Callable[..., Served], streamed: bool) -> None:
    served = serve(max_running=8, max_batched_tokens=16)
    ids = ask(served, return_token_ids=True).metas[0].accepted.prompt_token_ids
    answer = ask(served, prompt_logprobs=2, n=2, streamed=streamed, echo=True)
    for index in range(2):
        first, *others = reported(answer, index)
        assert (first.logprob, first.top) == (None, [])
        assert [each.id for each in (first, *others)] == ids
        assert all(each.logprob is not None and each.logprob <= each.top[0].logprob for each in others)
        assert {len(each.top) for each in others} == {2}
        assert b"".join(bytes(each.bytes) for each in (first, *others)).decode() == PROMPT
    assert answer.metas[-1].usage.cached_tokens == 0
    plain = told(ask(served, streamed=streamed), 1)[0].text
    assert [choice.text for choice in told(answer, 2)] == [PROMPT + plain] * 2


def test_an_empty_prompt_of_a_model_that_begins_none_is_refused(
    serve: Callable[..., Served], text: ChatText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text.format, "_prefix", [])
    refused = serve().ask("", prompt_logprobs=0, **GREEDY).wait().refused
    assert refused == (RefusalCode.INVALID_REQUEST, "the prompt has no tokens")


def test_a_chats_last_token_is_told_as_the_original_code_had_it(served: Served) -> None:
    """The greedy answer to a prompt, as part of a prompt: every token of it is the likeliest."""
    case = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))["cases"][0]
    ids = [*case["input_ids"], *case["greedy_ids"]]
    found = reported(ask(served, "", prompt_token_ids=ids, prompt_logprobs=1))
    for each in found[len(case["input_ids"]) :]:
        assert each.top[0].id == each.id
        assert each.top[0].logprob == each.logprob


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_no_new_tokens_leave_the_prompt(served: Served, text: ChatText, streamed: bool, eos: bool) -> None:
    asked: dict[str, Any] = {"logit_bias": {text.tokenizer.eos_id: 100.0}, "ignore_eos": False} if eos else {}
    answer = ask(
        served, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=1, streamed=streamed,
        return_token_ids=True, **asked,
    )  # fmt: skip
    assert answer.text == PROMPT
    assert [each for meta in answer.metas for each in meta.logprobs or ()] == []
    assert answer.token_ids == []
    last = answer.metas[-1]
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    assert (last.usage.completion_tokens, last.usage.prompt_tokens) == (0, len(reported(answer)))


@pytest.mark.parametrize("asked", [False, True])
def test_ranks_are_told_where_they_are_asked_for(served: Served, asked: bool) -> None:
    first, *others = reported(ask(served, prompt_logprobs=3, prompt_ranks=asked))
    assert first.rank is None
    for each in others:
        likely = [top.id for top in each.top]
        if not asked:
            assert each.rank is None
        elif each.id in likely:
            assert each.rank == likely.index(each.id) + 1
        else:
            assert each.rank is not None
            assert each.rank > 3


def test_a_prompt_of_one_token_has_an_entry(served: Served) -> None:
    (entry,) = reported(ask(served, "", prompt_token_ids=[5], prompt_logprobs=3))
    assert (entry.id, entry.logprob) == (5, None)


def test_special_tokens_of_ids_are_in_their_text_where_asked_for(served: Served, text: ChatText) -> None:
    ids = [text.tokenizer.special_ids["sop"], *text.tokenizer.encode("The question")]
    for special, prompt in ((False, "The question"), (True, "sop The question")):
        answer = ask(
            served, "", prompt_token_ids=ids, echo=True, prompt_logprobs=0, max_tokens=0, show_special=special
        )
        assert b"".join(bytes(each.bytes) for each in reported(answer)).decode() == answer.text == prompt


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("length", [255, 256, 257, 511])
def test_no_response_tells_of_more_than_256_tokens(served: Served, length: int, streamed: bool) -> None:
    answer = ask(
        served, "", prompt_token_ids=[300] * length, prompt_logprobs=0, streamed=streamed, max_tokens=1
    )
    accepted, *reports, last = answer.metas
    sent = [len(meta.prompt_logprobs) for meta in reports]
    assert (sum(sent), len(sent)) == (length, 1 + (length > 256))
    assert max(sent) <= RESPONSE_TOKENS
    assert accepted.prompt_logprobs is last.prompt_logprobs is None
    assert [meta.finish_reason for meta in answer.metas] == [None] * (len(answer.metas) - 1) + ["length"]


def test_what_cannot_be_has_the_floor(text: ChatText) -> None:
    report = PromptReport(Generation(prompt_logprobs=0), text.tokenizer, [300] * 601)
    scored = (TokenLogprobs(id=300, logprob=float("-inf"), top=()),) * 300
    parts = list(report.take(scored)) + list(report.take(scored))
    assert [len(part) for part in parts] == [256, 45, 256, 44]
    assert b"-9999" in encode_meta(Meta(prompt_logprobs=parts[1]))
