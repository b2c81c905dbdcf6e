"""Logits of prompts: how many at once, and faults; `test_scoring.py` holds that each token has its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.triton_models.engine.fake_model import (
    GREEDY,
    POISON,
    FakeModel,
    continuation,
    ids,
    logits_of,
    request,
    run,
    weight,
)
from tests.triton_models.native_checkpoint import write_bloom
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.scheduler import LOGITS_ROWS
from triton_models.engine.sequence import FinishReason, Request, TokenOutput
from triton_models.engine.settings import EngineSettings

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


def asking(name: str, prompt: Sequence[int], count: int = 1, *, priority: int = 0) -> Request:
    return replace(request(name, prompt, replace(GREEDY, max_tokens=count), priority=priority), logits=True)


def check(outputs: list[TokenOutput], prompt: Sequence[int]) -> None:
    """Compare what was told with one pass over the prompt, without an engine."""
    told = [each.prompt_logits for each in outputs if each.prompt_logits is not None]
    position = 0
    for part in told:
        assert part.first == position
        assert part.values.dtype == torch.float32
        position += len(part.values)
    assert position == len(prompt)
    states = (torch.tensor(prompt).float() * weight(torch.arange(len(prompt)))).cumsum(0)
    torch.testing.assert_close(torch.cat([part.values for part in told]), logits_of(states))


def test_a_step_has_few_such_rows_and_all_decodes() -> None:
    model = FakeModel(max_positions=400)
    engine = Engine(
        model,
        EngineSettings(
            max_running=8,
            max_batched_tokens=512,
            burst_tokens=512,
            burst_steps=4,
            block_size=4,
            kv_blocks=300,
            draft_tokens=0,
        ),
    )
    engine.add(request("answer", (1, 2, 3), replace(GREEDY, max_tokens=40)))
    engine.step()
    prompts = {str(number): [number] * 150 for number in range(4)}
    for name, prompt in prompts.items():
        engine.add(asking(name, prompt))
    engine.add(request("other", [9] * 100))
    begun = len(model.steps)
    outputs = run(engine)
    for name, prompt in prompts.items():
        check(outputs[name], prompt)
    assert ids(outputs["other"]) == continuation([9] * 100, 8)
    # The other prompt waits for none of them, and the answer for nobody.
    assert len(model.steps[begun]) == 1 + LOGITS_ROWS + 100
    answered = [each.token_id for each in outputs["answer"]]
    assert len(answered) == 40
    assert len(model.steps) - begun <= 40 + 1


def test_logits_that_are_not_finite_fail_the_request_alone() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(asking("bad", [1, 2, POISON, *range(20)]), asking("good", range(20)))
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert "not finite" in (outputs["bad"][-1].error or "")
    check(outputs["good"], range(20))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_they_are_those_of_transformers_on_a_gpu(tmp_path: Path) -> None:
    """Beside answers, and with steps that begin before the results of those before are known."""
    reference = write_bloom(tmp_path)
    engine = Engine(load_model(tmp_path, torch.float32, torch.device("cuda:0")), EngineSettings())
    prompts = {str(number): [number + place * 7 % 300 for place in range(90 + number)] for number in range(4)}
    engine.add(request("answer", (1, 2, 3), replace(GREEDY, max_tokens=100)))
    for name, prompt in prompts.items():
        engine.add(asking(name, prompt))
    outputs = run(engine)
    for name, prompt in prompts.items():
        found = [each.prompt_logits.values for each in outputs[name] if each.prompt_logits is not None]
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-3, rtol=1e-3)
