"""Log-probabilities of prompts, through the whole service."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.triton_models.serving.conftest import GOLDEN, Served
from tests.triton_models.serving.fakes import FakeResponder
from tests.triton_models.serving.told import told
from triton_models.engine.sequence import FinishReason, TokenLogprobs, TokenOutput
from triton_models.serving.answer import Answer
from triton_models.serving.chat_text import ChatText
from triton_models.serving.logprobs import RESPONSE_TOKENS, PromptReport
from wire.meta import PromptLogprob, encode_meta
from wire.sampling import Generation

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


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_tells_the_whole_prompt(serve: Callable[..., Served], stream: bool) -> None:
    served = serve(max_running=8, max_batched_tokens=16)
    ids = ask(served, return_token_ids=True).metas[0].accepted.prompt_token_ids
    answer = ask(served, prompt_logprobs=2, n=2, stream=stream, echo=True)
    for index in range(2):
        first, *others = reported(answer, index)
        assert (first.logprob, first.top) == (None, [])
        assert [each.id for each in (first, *others)] == ids
        assert all(each.logprob is not None and each.logprob <= each.top[0].logprob for each in others)
        assert {len(each.top) for each in others} == {2}
        assert b"".join(bytes(each.bytes) for each in (first, *others)).decode() == PROMPT
    assert answer.metas[-1].usage.cached_tokens == 0
    plain = told(ask(served, stream=stream), 1)[0].text
    assert [choice.text for choice in told(answer, 2)] == [PROMPT + plain] * 2


def test_a_chats_last_token_is_told_as_the_original_code_had_it(served: Served) -> None:
    """The greedy answer to a prompt, as part of a prompt: every token of it is the likeliest."""
    case = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))["cases"][0]
    ids = [*case["input_ids"], *case["greedy_ids"]]
    found = reported(ask(served, "", prompt_token_ids=ids, prompt_logprobs=1))
    for each in found[len(case["input_ids"]) :]:
        assert each.top[0].id == each.id
        assert each.top[0].logprob == each.logprob


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_no_new_tokens_leave_the_prompt(served: Served, text: ChatText, stream: bool, eos: bool) -> None:
    asked: dict[str, Any] = {"logit_bias": {text.tokenizer.eos_id: 100.0}, "ignore_eos": False} if eos else {}
    answer = ask(
        served, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=1, stream=stream,
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [255, 256, 257, 511])
def test_no_response_tells_of_more_than_256_tokens(served: Served, length: int, stream: bool) -> None:
    answer = ask(served, "", prompt_token_ids=[300] * length, prompt_logprobs=0, stream=stream, max_tokens=1)
    told = [len(meta.prompt_logprobs) for meta in answer.metas if meta.prompt_logprobs]
    assert (sum(told), len(told)) == (length, 1 + (length > 256))
    assert max(told) <= RESPONSE_TOKENS
    first_token = next(place for place, meta in enumerate(answer.metas) if meta.tokens)
    assert not any(meta.prompt_logprobs for meta in answer.metas[first_token + 1 :])
    assert [meta.finish_reason for meta in answer.metas] == [None] * (len(answer.metas) - 1) + ["length"]


def test_what_cannot_be_has_the_floor_and_the_end_comes_last(text: ChatText) -> None:
    asked = Generation(prompt_logprobs=0)
    report = PromptReport.asked(asked, text.tokenizer, [300] * 601)
    answer = Answer(asked, text.tokenizer, text.answer(asked), 0, prompt=report)
    scored = (TokenLogprobs(id=300, logprob=float("-inf"), top=()),) * 300
    answer.take(TokenOutput(request_id="a", prompt_tokens=601, prompt_logprobs=scored))
    end = FinishReason.LENGTH
    answer.take(
        TokenOutput(
            request_id="a", prompt_tokens=601, prompt_logprobs=scored, token_id=301, finish_reason=end
        )
    )
    parts = [meta for _, meta in answer.prompt_parts()]
    assert [(len(meta.prompt_logprobs or ()), meta.tokens, meta.finish_reason) for meta in parts] == [
        (256, 0, None)
    ] * 2
    assert b"-9999" in encode_meta(parts[1])
    _, last = answer.next_response()
    assert (len(last.prompt_logprobs or ()), last.tokens, last.finish_reason) == (89, 1, "length")
