from typing import Any

import pytest

from tests.triton_models.engine.fake_model import FakeModel, ids, request, run
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import TOP_K_LIMIT, SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import AnyToken
from triton_models.errors import InvalidRequestError


@pytest.mark.parametrize("values", [{"top_k": 2**31}, {"min_tokens": 5, "max_tokens": 4}])
def test_what_no_answer_can_have_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(values))):
        SamplingParams(**values)


def test_the_ends_of_each_range_can_be_sampled() -> None:
    engine = Engine(FakeModel(), EngineSettings())
    for number, temperature in enumerate([1e-5, 2.0]):
        params = SamplingParams(
            temperature=temperature,
            top_p=1e-12,
            top_k=TOP_K_LIMIT,
            min_p=1.0,
            repetition_penalty=0.01 if number else 100.0,
            presence_penalty=2.0 if number else -2.0,
            frequency_penalty=2.0 if number else -2.0,
            seed=2**63 - 1,
            max_tokens=3,
            min_tokens=3,
            stop_token_ids=frozenset({2}),
            logit_bias={1: 100.0, 2: -100.0},
            logprobs=20,
        )
        engine.add(request(str(number), sampling=params))
    assert [ids(answer) for answer in run(engine).values()] == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("values", "truncated", "penalised", "plain"),
    [
        ({}, False, False, True),
        ({"temperature": 0.5, "seed": 4}, False, False, True),
        ({"top_k": 1}, True, False, True),
        ({"top_p": 0.9}, True, False, True),
        ({"min_p": 0.1}, True, False, True),
        ({"repetition_penalty": 1.1}, False, True, False),
        ({"presence_penalty": -0.1}, False, True, False),
        ({"frequency_penalty": 0.1}, False, True, False),
        ({"logit_bias": {1: 1.0}}, False, False, False),
        ({"min_tokens": 1}, False, False, False),
        ({"logprobs": 0}, False, False, False),
        ({"mask": AnyToken()}, False, False, True),
    ],
)
def test_what_a_request_uses_is_known(
    values: dict[str, Any], truncated: bool, penalised: bool, plain: bool
) -> None:
    params = SamplingParams(**values)
    assert (params.truncated, params.penalised, params.plain) == (truncated, penalised, plain)
