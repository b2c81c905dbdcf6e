"""What of an answer shows where a request asks for more than its text: the prompt, stops, special tokens."""

from typing import Any

import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.told import told
from triton_models.serving.chat_text import ChatText
from wire.refusal import RefusalCode
from wire.request import Generation

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def ask(served: Served, prompt: str = "The question", **asked: Any) -> Any:
    return served.ask(prompt, **{**GREEDY, **asked}).wait()


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_puts_the_prompt_in_front_of_every_choice(served: Served, streamed: bool) -> None:
    prompt = "  The question\n👋 "
    plain = ask(served, prompt, raw=True, streamed=streamed, return_token_ids=True)
    echoed = ask(served, prompt, raw=True, streamed=streamed, echo=True, n=2)
    assert [choice.text for choice in told(echoed, 2)] == [prompt + plain.text] * 2
    ids = plain.metas[0].accepted.prompt_token_ids
    by_ids = ask(served, "", raw=True, prompt_token_ids=ids, echo=True, streamed=streamed)
    assert by_ids.text == prompt + plain.text


def test_an_echo_is_not_looked_through_for_stops(served: Served) -> None:
    answer = ask(served, "The question", raw=True, echo=True, stop=["question"])
    assert answer.text.startswith("The question")
    assert answer.metas[-1].usage.completion_tokens > 0


def test_a_character_cut_by_the_prompts_end_is_whole_in_the_echo(served: Served, text: ChatText) -> None:
    ids = text.tokenizer.encode("a👋")
    asked = {"raw": True, "echo": True, "max_tokens": 1, "temperature": 0}
    answer = ask(served, "", prompt_token_ids=ids[:-1], logit_bias={ids[-1]: 100.0}, **asked)
    assert answer.text == "a👋"


def test_a_conversation_has_no_echo(served: Served) -> None:
    assert ask(served, echo=True).refused[0] is RefusalCode.INVALID_REQUEST


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_shows_where_asked_for(served: Served, raw: bool, streamed: bool) -> None:
    whole = ask(served, raw=raw).text
    stop = whole.strip()[3:6]
    end = whole.index(stop)
    without = ask(served, raw=raw, stop=[stop], streamed=streamed)
    included = ask(served, raw=raw, stop=[stop], streamed=streamed, include_stop=True)
    assert without.text == whole[:end]
    assert included.text == whole[:end] + stop
    for answer in (without, included):
        assert (answer.metas[-1].finish_reason, answer.metas[-1].stop_reason) == ("stop", stop)


def test_a_stop_ids_text_shows_where_asked_for(served: Served) -> None:
    plain = ask(served, raw=True, return_token_ids=True, logprobs=0)
    stop = plain.token_ids[4]
    asked: dict[str, Any] = {"raw": True, "stop_token_ids": [stop], "logprobs": 0, "return_token_ids": True}
    without, included = (ask(served, **asked, include_stop=include) for include in (False, True))
    assert without.token_ids == included.token_ids
    assert included.text.startswith(without.text)
    assert len(included.text) > len(without.text)
    shown = [
        [each.id for meta in answer.details for each in meta.logprobs or ()] for answer in (without, included)
    ]
    assert shown[1] == shown[0] + [stop]


def test_special_tokens_show_where_asked_for(served: Served, text: ChatText) -> None:
    opens = text.tokenizer.special_ids["<|assistant|>"]
    asked: dict[str, Any] = {"max_tokens": 3, "logit_bias": {opens: 100.0}}
    hidden, shown = (ask(served, **asked, show_special=show) for show in (False, True))
    assert hidden.text == ""
    assert [segment.role for meta in hidden.details for segment in meta.segments or ()] == ["assistant"] * 3
    assert shown.text == "<|assistant|>" * 3
    assert not any(meta.segments for meta in shown.metas)
    stopped = ask(served, **asked, show_special=True, stop_token_ids=[opens])
    assert stopped.text == ""
    both = ask(served, **asked, show_special=True, stop_token_ids=[opens], include_stop=True)
    assert both.text == "<|assistant|>"
    alone = ask(served, **asked, stop_token_ids=[opens], include_stop=True)
    assert alone.text == ""


def test_special_tokens_cannot_be_text_and_tell_calls_apart(text: ChatText, served: Served) -> None:
    assert ask(served, show_special=True, end_after_call_of=["a"]).refused[0] is RefusalCode.INVALID_REQUEST
    assert text.answer(Generation(show_special=True)).push(text.tokenizer.special_ids["sop"]).text == "sop"
