"""What a request asks of the sampler, through the whole engine: in company, under overlap, preempted."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.triton_models.engine.fake_model import (
    POISON,
    VOCABULARY,
    FakeModel,
    continuation,
    ids,
    logits_of,
    request,
    run,
    weight,
)
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Request, TokenOutput
from triton_models.engine.settings import EngineSettings

SMALL = EngineSettings(max_running=4, max_waiting=64, max_batched_tokens=8, block_size=4, kv_blocks=40)
OVERLAPPED = replace(PLAIN, overlap=True)

backends = pytest.mark.parametrize("backend", [PLAIN, OVERLAPPED], ids=["in turn", "overlapped"])


def penalised(prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """The greedy answer under penalties, computed without an engine."""
    tokens = list(prompt)
    answer: list[int] = []
    for _ in range(count):
        state = (torch.tensor(tokens).float() * weight(torch.arange(len(tokens)))).sum()
        logits = logits_of(state[None])[0]
        for key in set(tokens):
            repetition = params.repetition_penalty
            logits[key] = logits[key] / repetition if logits[key] > 0 else logits[key] * repetition
        for key in set(answer):
            logits[key] -= params.frequency_penalty * answer.count(key) + params.presence_penalty
        answer.append(int(logits.argmax()))
        tokens.append(answer[-1])
    return answer


GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PENALTIES = [
    replace(GREEDY, repetition_penalty=1.6),
    replace(GREEDY, repetition_penalty=0.7),
    replace(GREEDY, presence_penalty=2.0),
    replace(GREEDY, frequency_penalty=-2.0),
    replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.0),
    GREEDY,
]


@backends
@pytest.mark.parametrize("blocks", [40, 13], ids=["room", "preempted"])
def test_penalties_count_prompt_and_answer(backend: object, blocks: int) -> None:
    engine = Engine(FakeModel(), replace(SMALL, kv_blocks=blocks), backend=backend)
    # Prompts of several chunks, more requests than slots.
    asked = {
        f"{number}-{place}": (tuple(range(number, number + 11)), params)
        for number in (3, 17)
        for place, params in enumerate(PENALTIES)
    }
    for name, (prompt, params) in asked.items():
        engine.add(request(name, prompt, params))
    outputs = run(engine)
    assert (engine.stats().preemptions > 0) == (blocks == 13)
    changed = 0
    for name, (prompt, params) in asked.items():
        assert ids(outputs[name]) == penalised(prompt, params, 24)
        changed += ids(outputs[name]) != continuation(prompt, 24)
    assert changed == 10


def mixed(number: int, numbers: random.Random) -> Request:
    """A request that asks for anything, and any prompt."""
    least = numbers.choice([0, 0, 5])
    params = SamplingParams(
        temperature=numbers.choice([0.0, 0.4, 1.0, 1.6]),
        top_p=numbers.choice([1.0, 1.0, 0.7]),
        top_k=numbers.choice([0, 0, 5]),
        min_p=numbers.choice([0.0, 0.0, 0.1, 1.0]),
        repetition_penalty=numbers.choice([1.0, 1.0, 1.4]),
        presence_penalty=numbers.choice([0.0, 0.0, 1.0]),
        frequency_penalty=numbers.choice([0.0, 0.0, -0.5, 0.8]),
        logit_bias=numbers.choice([{}, {7: 4.0, 8: -100.0}]),
        logprobs=numbers.choice([None, 0, 20]),
        seed=numbers.randrange(2**63),
        max_tokens=numbers.randrange(max(1, least), 30),
        min_tokens=least,
        stop_token_ids=frozenset(numbers.sample(range(VOCABULARY), numbers.choice([0, 6]))),
    )
    prompt = [numbers.randrange(60) for _ in range(numbers.randrange(1, 20))]
    return request(str(number), prompt, params)


def alike(outputs: list[TokenOutput], alone: list[TokenOutput]) -> bool:
    def seen(each: TokenOutput) -> tuple[object, ...]:
        return each.token_id, each.finish_reason, each.logprobs

    return [seen(each) for each in outputs] == [seen(each) for each in alone]


@backends
@pytest.mark.parametrize("blocks", [400, 24], ids=["room", "preempted"])
def test_64_mixed_requests_get_what_each_gets_alone(backend: object, blocks: int) -> None:
    numbers = random.Random(5)
    requests = [mixed(number, numbers) for number in range(64)]
    settings = replace(SMALL, max_running=16, max_batched_tokens=24, kv_blocks=blocks)
    together = Engine(FakeModel(), settings, backend=backend)
    for each in requests:
        together.add(each)
    outputs = run(together)
    assert (together.stats().preemptions > 0) == (blocks == 24)
    alone = Engine(FakeModel(), SMALL)
    for each in requests:
        alone.add(each)
        (expected,) = run(alone).values()
        assert alike(outputs[each.request_id], expected), each


@backends
def test_stops_wait_for_the_least_number_of_tokens(backend: object) -> None:
    stops = frozenset(range(2, VOCABULARY))
    engine = Engine(FakeModel(), SMALL, backend=backend)
    for least in (0, 1, 2, 7):
        params = SamplingParams(
            temperature=2.0, seed=least, max_tokens=12, min_tokens=least, stop_token_ids=stops
        )
        engine.add(request(str(least), (5, 6), params))
    for name, outputs in run(engine).items():
        *before, last = ids(outputs)
        assert len(before) == int(name)
        assert set(before) <= {0, 1}
        assert last in stops
        assert outputs[-1].finish_reason is FinishReason.STOP


@backends
def test_a_row_that_is_not_finite_fails_alone_and_leaves_its_slot_clean(backend: object) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=20,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        top_p=0.9,
        min_p=0.01,
    )
    alone = Engine(FakeModel(), SMALL)
    alone.add(request("x", (4, 5), params))
    (expected,) = run(alone).values()
    engine = Engine(FakeModel(), SMALL, backend=backend)
    engine.add(request("sick", [POISON] * 4, params))
    engine.add(request("healthy", (4, 5), params))
    outputs = run(engine)
    assert [each.finish_reason for each in outputs["sick"]] == [FinishReason.ERROR]
    assert ids(outputs["healthy"]) == ids(expected)
    engine.add(request("next", (4, 5), params))
    assert ids(run(engine)["next"]) == ids(expected)


@backends
@pytest.mark.parametrize("cut", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_what_leaves_one_token_is_greedy(backend: object, cut: dict[str, Any]) -> None:
    engine = Engine(FakeModel(), SMALL, backend=backend)
    for number in range(6):
        params = SamplingParams(temperature=2.0, seed=number, max_tokens=10, **cut)
        engine.add(request(str(number), (number, 7), params))
    for name, outputs in run(engine).items():
        assert ids(outputs) == continuation((int(name), 7), 10)


@backends
def test_log_probabilities_are_of_the_raw_logits_whatever_is_asked(backend: object) -> None:
    params = SamplingParams(
        temperature=0.3, seed=1, max_tokens=9, presence_penalty=2.0, logit_bias={9: 5.0}, top_k=4, logprobs=20
    )
    engine = Engine(FakeModel(), SMALL, backend=backend)
    for number in range(3):
        engine.add(request(str(number), (5, number), replace(params, seed=number, logprobs=20 - number)))
    for number, outputs in enumerate(run(engine).values()):
        tokens = [5, number]
        for output in outputs:
            state = (torch.tensor(tokens).float() * weight(torch.arange(len(tokens)))).sum()
            raw = logits_of(state[None])[0].log_softmax(dim=0)
            assert output.logprobs is not None
            assert output.token_id is not None
            assert output.logprobs.id == output.token_id
            assert output.logprobs.logprob == pytest.approx(raw[output.token_id].item(), abs=1e-5)
            top = raw.topk(20 - number)
            assert [key for key, _ in output.logprobs.top] == top.indices.tolist()
            assert [value for _, value in output.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)
            tokens.append(output.token_id)
