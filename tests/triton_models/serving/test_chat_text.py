import pytest

from tests.triton_models.serving.conftest import Served
from triton_models.serving.chat_text import ChatText
from wire.refusal import RefusalCode
from wire.sampling import Generation


def test_a_raw_prompt_is_continued_outside_the_chat_format(served: Served) -> None:
    asked = {"raw": True, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    by_text = served.ask("你好", **asked).wait()
    prompt_ids = by_text.metas[0].accepted.prompt_token_ids
    chat = served.ask("你好", max_tokens=1, return_token_ids=True).wait().metas[0].accepted.prompt_token_ids
    assert prompt_ids[:2] == chat[:2]
    assert prompt_ids[2:] != chat[2:]
    assert len(prompt_ids) < len(chat)
    by_ids = served.ask("", prompt_token_ids=prompt_ids, **asked).wait()
    assert (by_ids.token_ids, by_ids.text) == (by_text.token_ids, by_text.text)
    assert not any(meta.segments for meta in by_text.metas)


@pytest.mark.parametrize(
    ("sampling", "history"),
    [(b'{"raw":true}', b'[{"role":"user","content":"a"}]'), (b'{"raw":true,"role":"system"}', b"")],
)
def test_a_raw_prompt_has_no_turns(served: Served, sampling: bytes, history: bytes) -> None:
    refused = served.send(sampling, "b", history=history).wait()
    assert refused.refusal == (RefusalCode.INVALID_REQUEST, "raw excludes history and role")


@pytest.mark.parametrize(("raw", "shown"), [(True, " The"), (False, "The")])
def test_a_raw_answer_goes_on_from_text(text: ChatText, raw: bool, shown: str) -> None:
    assert text.answer(Generation(raw=raw)).push(text.tokenizer.encode("The")[0]).text == shown


def test_the_answers_first_line_becomes_part_of_the_prompt(served: Served) -> None:
    asked = {"max_tokens": 1, "return_token_ids": True}
    plain, named = (
        served.ask("hi", **asked, **more).wait().metas[0].accepted.prompt_token_ids
        for more in ({}, {"answer_metadata": "get"})
    )
    assert named[: len(plain)] == plain
    assert len(named) > len(plain)


@pytest.mark.parametrize("sampling", [b'{"raw":true,', b'{"prompt_token_ids":[5],'])
def test_what_is_no_conversation_has_no_first_line(served: Served, sampling: bytes) -> None:
    code, why = served.send(sampling + b'"answer_metadata":""}', "").wait().refusal
    assert (code, why[:24]) == (RefusalCode.INVALID_REQUEST, "answer_metadata belongs ")


@pytest.mark.parametrize(("last", "tokens", "reason"), [([], 5, "length"), (["get"], 1, "stop")])
def test_the_answer_ends_after_its_call(
    served: Served, text: ChatText, last: list[str], tokens: int, reason: str
) -> None:
    opens = text.tokenizer.special_ids["<|assistant|>"]
    asked = {"temperature": 0, "max_tokens": 5, "logit_bias": {opens: 100.0}, "answer_metadata": "get"}
    end = served.ask("hi", end_after_call_of=last, **asked).wait().metas[-1]
    assert (end.finish_reason, end.usage.completion_tokens) == (reason, tokens)
    assert end.stop_reason is None
