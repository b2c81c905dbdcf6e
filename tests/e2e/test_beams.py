"""Beam searches by the official SDK on the real Triton: the answers are those of transformers."""

import asyncio
import contextlib
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.e2e.families_server import BASE, CHAT, Families
from tests.e2e.test_load import until
from tests.e2e.up_process import metric

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = list(b"The quick brown fox jumps over the lazy dog and runs")
QUESTION: list[Any] = [{"role": "user", "content": "hello"}]


def searched(
    served: Families, model: str, prompt: list[int], width: int, answers: int, **options: Any
) -> Any:
    """Return what transformers finds."""
    with torch.inference_mode():
        found = served.references[model].generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=answers,
            max_new_tokens=12,
            pad_token_id=0,
            do_sample=False,
            **options,
        )
    return found[:, len(prompt) :].tolist()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("width", "answers", "options"),
    [
        (4, 4, {}),
        (2, 2, {"length_penalty": 0.0, "early_stopping": True}),
        (8, 3, {"length_penalty": 2.0, "early_stopping": "never"}),
    ],
)
def test_completions_are_those_of_transformers(
    families: Families, width: int, answers: int, options: dict[str, Any], stream: bool
) -> None:
    endless = searched(families, BASE, PROMPT, width, 1, eos_token_id=None)[0]
    stops = sorted(set(endless[3:7:2]))
    expected = searched(families, BASE, PROMPT, width, answers, eos_token_id=stops, **options)
    search = {"use_beam_search": True, "stop_token_ids": stops, "ignore_eos": True, **options}
    search |= {} if width == answers else {"best_of": width}
    asked: dict[str, Any] = {"model": BASE, "prompt": PROMPT, "max_tokens": 12, "n": answers}
    asked["extra_body"] = {**search, "return_token_ids": True}
    if stream:
        chunks = list(families.sdk.completions.create(**asked, stream=True))
        found: list[Any] = sorted(
            (each for chunk in chunks for each in chunk.choices), key=lambda each: each.index
        )
        assert [each.index for each in found] == list(range(answers)), "one chunk for each answer"
    else:
        answer = families.sdk.completions.create(**asked)
        found = answer.choices
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(each.model_extra["token_ids"]) for each in found)
        assert answer.usage.prompt_tokens == len(PROMPT)
    ids = [each.model_extra["token_ids"] for each in found]
    assert [each.finish_reason for each in found] == [
        "stop" if each[-1] in stops else "length" for each in ids
    ]
    assert ids == [each[: len(mine)] for mine, each in zip(ids, expected, strict=True)]
    assert all(len(each) == 12 or each[-1] in stops for each in ids)


def test_a_chat_is_searched_like_a_text(families: Families) -> None:
    asked: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "max_tokens": 12, "n": 3}
    search = {"use_beam_search": True, "best_of": 5, "ignore_eos": True, "return_token_ids": True}
    answer = families.sdk.chat.completions.create(**asked, logprobs=True, top_logprobs=1, extra_body=search)
    prompt = answer.model_extra["prompt_token_ids"]
    expected = searched(families, CHAT, prompt, 5, 3, eos_token_id=None)
    assert [each.model_extra["token_ids"] for each in answer.choices] == expected
    scores = [sum(each.logprob for each in choice.logprobs.content) for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)
    alone = families.sdk.chat.completions.create(**asked | {"n": 1}, extra_body=search | {"best_of": 1})
    assert (
        alone.choices[0].model_extra["token_ids"]
        == searched(families, CHAT, prompt, 1, 1, eos_token_id=None)[0]
    )


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"n": 17}, "n"),
        ({"stop": "."}, "stop"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    families: Families, asked: dict[str, Any], param: str
) -> None:
    body = {"use_beam_search": param != "best_of", **asked}
    with pytest.raises(openai.BadRequestError) as of_completion:
        families.sdk.completions.create(model=BASE, prompt="a", extra_body=body)
    with pytest.raises(openai.BadRequestError) as of_chat:
        families.sdk.chat.completions.create(model=CHAT, messages=QUESTION, extra_body=body)
    assert of_completion.value.param == of_chat.value.param == param


async def test_others_are_answered_meanwhile_and_a_hang_up_ends_it(families: Families) -> None:
    """The search would take minutes; others do not wait for it, and nothing of it is left behind."""
    up = families.up
    body = {"model": BASE, "prompt": PROMPT, "use_beam_search": True, "n": 16, "ignore_eos": True}

    def gauge(name: str) -> float:
        text = httpx.get(up.triton_metrics, timeout=20).text
        return metric(text, f"tritongate_engine_{name}", model=BASE)

    async with httpx.AsyncClient(timeout=100) as client:
        long = asyncio.create_task(
            client.post(f"{up.base_url}/v1/completions", json=body | {"max_tokens": 4000})
        )
        await until(lambda: gauge("requests_running") > 0)
        short = {"model": BASE, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post(f"{up.base_url}/v1/completions", json=short) for _ in range(4))
        )
        assert {each.status_code for each in answers} == {200}
        assert len({each.json()["choices"][0]["text"] for each in answers}) == 1
        assert not long.done()
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
    await until(lambda: up.gauge("tritongate_requests_in_flight") == 0)
    await until(lambda: gauge("requests_running") == gauge("kv_blocks_used") == 0)
