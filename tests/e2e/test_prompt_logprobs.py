"""vLLM's `prompt_logprobs` on the real Triton, against a forward pass of the model in this process."""

from functools import cache
from typing import Any

import openai
import pytest
import torch

from tests.e2e.up_process import GOLDEN
from tests.triton_models.engine.models.whole_pass import whole_passes
from triton_models.checkpoint import load_model
from triton_models.engine.models.decoder import Decoder

pytestmark = pytest.mark.e2e

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你好，山里的小狐狸 👋"},
]
MODELS = ("chatglm3", "chatglm2")
NEAR = 1e-3


@cache
def loaded(model: str) -> Decoder:
    found = load_model(GOLDEN / model, torch.float32, torch.device("cpu"))
    assert isinstance(found, Decoder)
    return found


def check(told: Any, ids: list[int], top: int, model: str) -> None:
    """Compare what was told of the prompt `ids` with what the model makes of it at one go."""
    first, *others = told
    assert first is None
    raw = whole_passes(loaded(model), ids)[:-1].log_softmax(dim=-1)
    for entry, token, row in zip(others, ids[1:], raw, strict=True):
        assert next(iter(entry)) == str(token), "its own comes first"
        assert len(entry) in {top, top + 1} - {0}
        for key, each in entry.items():
            value = row[int(key)].item()
            assert set(each) == {"logprob", "rank", "decoded_token"}
            assert each["logprob"] == pytest.approx(value, abs=NEAR)
            assert 1 + (row > value + NEAR).sum() <= each["rank"] <= (row > value - NEAR).sum()
            assert isinstance(each["decoded_token"], str)
        ranks = [each["rank"] for each in entry.values()]
        assert set(range(1, top + 1)) <= set(ranks)
        assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("top", [0, 1, 20])
def test_a_chats_whole_prompt_is_told_once(model: str, top: int, sdk: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": top, "return_token_ids": True}
    messages = MESSAGES if model == "chatglm3" else MESSAGES[1:]
    asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0}
    plain = sdk.chat.completions.create(**asked)
    answer = sdk.chat.completions.create(**asked, n=2, extra_body=extra)
    assert [choice.message.content for choice in answer.choices] == [plain.choices[0].message.content] * 2
    told, ids = answer.prompt_logprobs, answer.prompt_token_ids
    assert len(told) == len(ids) == plain.usage.prompt_tokens == answer.usage.prompt_tokens
    check(told, ids, top, model)
    # The format's own tokens are in it, by their names.
    names = [next(iter(entry.values()))["decoded_token"] for entry in told[1:]]
    assert names[0] == "sop"
    assert (model == "chatglm2") == ("<|assistant|>" not in names)
    assert not hasattr(plain, "prompt_logprobs")
    assert not any(hasattr(choice, "prompt_logprobs") for choice in answer.choices)


@pytest.mark.parametrize("model", MODELS)
def test_each_choice_of_a_completion_is_told_of_its_own_prompt(model: str, sdk: openai.OpenAI) -> None:
    answer: Any = sdk.completions.create(
        model=model, prompt=["The question is this one", "你好 👋"], max_tokens=1, n=2,
        extra_body={"prompt_logprobs": 3, "return_token_ids": True},
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.logprobs is None
        check(choice.prompt_logprobs, choice.prompt_token_ids, 3, model)


@pytest.mark.parametrize(("top", "beside"), [(20, 1), (1, 4), (0, 0)])
def test_an_echo_and_it_are_each_told_what_they_ask_for(top: int, beside: int, sdk: openai.OpenAI) -> None:
    ids = [300 + place * 7 % 500 for place in range(300)]
    asked: dict[str, Any] = {"model": "chatglm3", "prompt": ids, "max_tokens": 0, "echo": True}
    alone = sdk.completions.create(**asked, logprobs=beside).choices[0]
    both = sdk.completions.create(**asked, logprobs=beside, extra_body={"prompt_logprobs": top}).choices[0]
    check(both.prompt_logprobs, ids, top, "chatglm3")
    assert both.text == alone.text
    for mine, other in zip(both.logprobs.top_logprobs[1:], alone.logprobs.top_logprobs[1:], strict=True):
        assert mine == pytest.approx(other, abs=NEAR)
    own = [next(iter(entry.values()))["logprob"] for entry in both.prompt_logprobs[1:]]
    assert own == both.logprobs.token_logprobs[1:]


@pytest.mark.parametrize(
    "wrong", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": 0, "stream": True}]
)
def test_what_cannot_be_told_is_refused_by_name(wrong: dict[str, Any], sdk: openai.OpenAI) -> None:
    for ask in (
        lambda: sdk.chat.completions.create(model="chatglm3", messages=MESSAGES, extra_body=wrong),
        lambda: sdk.completions.create(model="chatglm3", prompt="a", extra_body=wrong),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert refused.value.param == "prompt_logprobs"
