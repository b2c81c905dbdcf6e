"""The engine on the golden checkpoints, against what the original code answered in fp32."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.models.whole_pass import WholeSequence, whole_pass, whole_passes
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.linear import Linear
from triton_models.engine.models import Norm
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

GOLDEN = Path(__file__).parents[3] / "golden"


@dataclass(frozen=True)
class Golden:
    model: Decoder
    cases: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["chatglm2", "chatglm3"])
def golden(request: pytest.FixtureRequest) -> Golden:
    directory = GOLDEN / request.param
    model = load_model(directory, torch.float32, torch.device("cpu"))
    cases = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) >= 6
    return Golden(model, cases)


class CountedRows(WholeSequence):
    """Counts the rows that go through a feed-forward part."""

    rows = 0

    def linear_swiglu(
        self, inputs: torch.Tensor, matrix: Linear, *, norm: Norm | None = None
    ) -> torch.Tensor:
        self.rows += len(inputs)
        return super().linear_swiglu(inputs, matrix, norm=norm)


def test_only_tokens_with_logits_go_through_the_last_feed_forward_part(golden: Golden) -> None:
    model, tokens = golden.model, golden.cases[0]["input_ids"]
    operations = CountedRows(len(tokens), model.kv_shape.heads)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(tokens), operations)
        some = model.logits(hidden[-2:].clone(), operations)
    assert operations.rows == (len(model.layers) - 1) * len(tokens) + 2
    torch.testing.assert_close(some, whole_passes(model, tokens)[-2:])


def check(golden: Golden, engine: Engine, order: list[int], *, prefix_cache: bool = True) -> None:
    """Add the cases in `order`, run, and compare each with the original's answer."""
    for number in order:
        case = golden.cases[number]
        count = len(case["greedy_ids"])
        sampling = SamplingParams(temperature=0.0, max_tokens=count, logprobs=5)
        asked = request(str(number), case["input_ids"], sampling)
        engine.add(replace(asked, prefix_cache=prefix_cache))
    outputs = run(engine)
    for number in order:
        case = golden.cases[number]
        answer = outputs[str(number)]
        assert ids(answer) == case["greedy_ids"]
        first = answer[0].logprobs
        assert first is not None
        assert [token for token, _ in first.top] == [token for token, _ in case["last_top5"]]
        wanted = [value for _, value in case["last_top5"]]
        assert [value for _, value in first.top] == pytest.approx(wanted, abs=1e-4)
        assert first.logprob == first.top[0][1]


def test_each_case_alone(golden: Golden) -> None:
    engine = Engine(golden.model, EngineSettings())
    for number in range(len(golden.cases)):
        check(golden, engine, [number])


@pytest.mark.parametrize("seed", range(3))
def test_all_at_once_in_any_order_with_prompts_in_chunks(golden: Golden, seed: int) -> None:
    order = list(range(len(golden.cases)))
    random.Random(seed).shuffle(order)
    settings = EngineSettings(max_running=16, max_batched_tokens=17 + 40 * seed, block_size=8)
    check(golden, Engine(golden.model, settings), order)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_all_at_once_with_too_few_blocks(golden: Golden, *, prefix_cache: bool) -> None:
    longest = max(len(case["input_ids"]) for case in golden.cases) + 24
    settings = EngineSettings(max_running=16, max_batched_tokens=64, block_size=2, kv_blocks=-(-longest // 2))
    engine = Engine(golden.model, settings)
    check(golden, engine, list(range(len(golden.cases))), prefix_cache=prefix_cache)
    # With what the prompts share held once, the blocks may do.
    assert prefix_cache or engine.stats().preemptions > 0


def test_logits_of_the_last_position(golden: Golden) -> None:
    """The log-probabilities above, tied to the raw logits by the one number that the soft-max forgets."""
    for case in golden.cases:
        logits = whole_pass(golden.model, case["input_ids"])
        assert logits[:16].tolist() == pytest.approx(case["last_logits_first16"], abs=2e-4)


@pytest.mark.parametrize("budget", [16, 37, 500])
def test_a_prompts_log_probabilities_are_those_of_one_pass_over_it(golden: Golden, budget: int) -> None:
    """In chunks of odd lengths, with others beside them, and with all of it in the prefix cache."""
    settings = EngineSettings(max_running=16, max_batched_tokens=budget, block_size=8)
    engine = Engine(golden.model, settings)
    prompts = [list(case["input_ids"]) for case in golden.cases]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=5)
            asked = request(f"{number}", prompt, sampling)
            engine.add(replace(asked, prompt_logprobs=3) if number % 3 else asked)
        outputs = run(engine)
        assert turn == 0 or outputs["0"][0].cached_tokens > 0
        for number, prompt in enumerate(prompts):
            told = [each for output in outputs[str(number)] for each in output.prompt_logprobs]
            if not number % 3:
                assert told == []
                continue
            raw = whole_passes(golden.model, prompt)[:-1].log_softmax(dim=-1)
            assert [each.id for each in told] == prompt[1:]
            for each, row in zip(told, raw, strict=True):
                own = row[each.id].item()
                assert each.logprob == pytest.approx(own, abs=1e-4)
                assert 1 + (row > own + 1e-4).sum() <= each.rank <= (row > own - 1e-4).sum()
                assert [value for _, value in each.top] == pytest.approx(
                    row.topk(3).values.tolist(), abs=1e-4
                )


def test_64_mixed_requests_get_what_each_gets_alone(golden: Golden) -> None:
    numbers = random.Random(64)
    vocabulary = golden.model.vocab_size
    requests = [
        request(
            str(number),
            [numbers.randrange(vocabulary) for _ in range(numbers.randrange(1, 60))],
            SamplingParams(
                temperature=numbers.choice([0.0, 0.5, 1.0, 1.5]),
                top_p=numbers.choice([1.0, 0.8]),
                top_k=numbers.choice([0, 0, 50]),
                min_p=numbers.choice([0.0, 0.0, 0.01]),
                repetition_penalty=numbers.choice([1.0, 1.0, 1.2]),
                frequency_penalty=numbers.choice([0.0, 0.0, 0.5]),
                seed=numbers.randrange(2**32),
                max_tokens=numbers.randrange(1, 30),
                logprobs=numbers.choice([None, 3]),
                logit_bias={numbers.randrange(vocabulary): 3.0} if number % 3 == 0 else {},
            ),
        )
        for number in range(64)
    ]
    alone = Engine(golden.model, EngineSettings())
    expected: dict[str, Any] = {}
    for each in requests:
        alone.add(each)
        expected |= run(alone)
    together = Engine(
        golden.model, EngineSettings(max_running=24, max_batched_tokens=60, block_size=4, kv_blocks=60)
    )
    for each in requests:
        together.add(each)
    outputs = run(together)
    assert together.stats().preemptions > 0
    for key, wanted in expected.items():
        assert ids(outputs[key]) == ids(wanted)
        assert outputs[key][-1].finish_reason == wanted[-1].finish_reason


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_quarter_of_the_memory_changes_no_greedy_answer(golden: Golden, *, prefix_cache: bool) -> None:
    numbers = random.Random(4)
    vocabulary = golden.model.vocab_size
    common = [numbers.randrange(vocabulary) for _ in range(30)]
    requests = [
        request(
            str(number),
            common[: numbers.choice([0, 10, 30])] + [numbers.randrange(vocabulary) for _ in range(10)],
            SamplingParams(temperature=0.0, max_tokens=numbers.randrange(10, 30)),
        )
        for number in range(24)
    ]
    alone = Engine(golden.model, EngineSettings())
    expected: dict[str, Any] = {}
    for each in requests:
        alone.add(replace(each, prefix_cache=False))
        expected |= run(alone)
    wanted = sum(-(-(len(each.prompt_ids) + (each.sampling.max_tokens or 0)) // 4) for each in requests)
    settings = EngineSettings(max_running=24, max_batched_tokens=64, block_size=4, kv_blocks=wanted // 4)
    engine = Engine(golden.model, settings)
    for each in requests:
        engine.add(replace(each, prefix_cache=prefix_cache))
    outputs = run(engine)
    assert engine.stats().preemptions > 0
    assert any(each[0].cached_tokens for each in outputs.values()) == prefix_cache
    assert {key: ids(each) for key, each in outputs.items()} == {
        key: ids(each) for key, each in expected.items()
    }
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype) -> None:
    directory = GOLDEN / "chatglm3"
    case = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["cases"][0]
    model = load_model(directory, dtype, torch.device("cpu"))
    engine = Engine(model, EngineSettings())
    engine.add(request("a", case["input_ids"], SamplingParams(temperature=0.0, max_tokens=3, logprobs=5)))
    answer = run(engine)["a"]
    assert ids(answer) == case["greedy_ids"][:3]
    assert answer[0].logprobs is not None
    assert answer[0].logprobs.logprob == pytest.approx(case["last_top5"][0][1], abs=0.1)
