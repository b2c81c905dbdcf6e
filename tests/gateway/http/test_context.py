import re

import pytest
from msgspec.structs import replace

from gateway.core.events import Accepted
from gateway.core.request import (
    Generation,
    PlainText,
    Prompt,
    TokenIds,
)
from gateway.core.upstream import ModelCard
from gateway.errors import ContextLengthError, InvalidRequestError
from gateway.http.run import PROMPT_LOGPROBS_LIMIT, check_context, check_prompt_logprobs


def test_only_what_is_kept_of_a_prompt_has_to_fit() -> None:
    long = TokenIds((5,) * 20)
    for kept in (1, 7, -1):
        check_context([replace(asked(long), truncate_prompt_tokens=kept)], card())
    check_context([replace(asked(long, 3), truncate_prompt_tokens=5)], card())
    for kept, max_tokens in ((8, None), (30, None), (5, 4)):
        with pytest.raises(ContextLengthError, match=f"the prompt has {min(kept, 20)} tokens"):
            check_context([replace(asked(long, max_tokens), truncate_prompt_tokens=kept)], card())


def asked(prompt: Prompt, max_tokens: int | None = None, field: str | None = None) -> Generation:
    return Generation(
        request_id="r", model="m", prompt=prompt, deadline=0.0, max_tokens=max_tokens, prompt_field=field
    )


def card(max_context: int | None = 8, *, ready: bool = True) -> ModelCard:
    return ModelCard(id="m", ready=ready, created=1, max_context=max_context)


@pytest.mark.parametrize(
    ("length", "max_tokens", "said"),
    [
        (8, None, "the prompt has 8 tokens; the context is 8, one for the answer"),
        (8, 0, "the prompt has 8 tokens; the context is 8, one for the answer"),
        (9, 1, "the prompt has 9 tokens; the context is 8, one for the answer"),
        (7, 2, "the prompt has 7 tokens and max_tokens is 2: together 9, and the context is 8"),
        (1, 8, "the prompt has 1 tokens and max_tokens is 8: together 9, and the context is 8"),
    ],
)
def test_ids_that_do_not_fit_are_refused_as_the_engine_does(
    length: int, max_tokens: int | None, said: str
) -> None:
    fits = asked(TokenIds((5,) * 7), 1)
    with pytest.raises(ContextLengthError, match=f"^{re.escape(said)}$") as alone:
        check_context([asked(TokenIds((5,) * length), max_tokens)], card())
    assert alone.value.param is None
    with pytest.raises(ContextLengthError, match=f"^{re.escape('prompt.1: ' + said)}$") as second:
        check_context([fits, asked(TokenIds((5,) * length), max_tokens, "prompt.1")], card())
    assert second.value.param == "prompt.1"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "of"),
    [
        (TokenIds((5,) * 7), None, card()),
        (TokenIds((5,) * 7), 0, card()),
        (TokenIds((5,) * 7), 1, card()),
        (TokenIds((5,) * 9), None, card(None)),
        (TokenIds((5,) * 9), None, card(ready=False)),
        (PlainText("a" * 90), 90, card()),
    ],
)
def test_what_fits_or_cannot_be_known_is_the_models_to_judge(
    prompt: Prompt, max_tokens: int | None, of: ModelCard
) -> None:
    check_context([asked(prompt, max_tokens)], of)


@pytest.mark.parametrize(("ranks", "param"), [(True, "prompt_logprobs"), (False, "logprobs")])
def test_no_answer_reports_more_of_its_prompts_than_it_can_have(ranks: bool, param: str) -> None:
    one = replace(asked(PlainText("x")), n=4, prompt_logprobs=7, prompt_ranks=ranks)
    most = PROMPT_LOGPROBS_LIMIT // (4 * 8)
    check_prompt_logprobs([one, one], Accepted(prompt_tokens=most))
    with pytest.raises(InvalidRequestError, match=f"{most * 32 + 32} log-probabilities") as raised:
        check_prompt_logprobs([one, one], Accepted(prompt_tokens=most + 1))
    assert raised.value.param == param
    without = replace(one, prompt_logprobs=None, prompt_ranks=False)
    check_prompt_logprobs([without], Accepted(prompt_tokens=10 * most))
