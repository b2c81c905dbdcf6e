import pytest
import torch

from tests.triton_models.engine.fake_model import FakeModel, continuation, ids, request, run
from triton_models.engine.engine import Engine
from triton_models.engine.operations import Operations
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.errors import WarmUpError

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=32)


@pytest.mark.parametrize("settings", [SMALL, EngineSettings(max_running=1, max_waiting=0, max_context=6)])
def test_it_leaves_an_engine_as_new(settings: EngineSettings) -> None:
    engine = Engine(FakeModel(), settings)
    warm_up(engine)
    assert (engine.open_requests, engine.stats().kv_blocks_used, engine.take_outputs()) == (0, 0, [])
    engine.add(request("a", (1, 2), SamplingParams(temperature=0.0, max_tokens=4)))
    assert ids(run(engine)["a"]) == continuation((1, 2), 4)


def test_it_meets_prompts_of_several_steps_and_prompts_beside_decodes() -> None:
    model = FakeModel()
    warm_up(Engine(model, SMALL))
    assert any(positions and positions[0] == 8 for positions in model.steps)
    assert any(positions and positions[0] > 0 and 0 in positions[1:] for positions in model.steps)


class Broken(FakeModel):
    def logits(self, hidden: torch.Tensor, operations: Operations) -> torch.Tensor:
        return torch.full((len(hidden), self.vocab_size), torch.nan)


def test_a_failure_is_told() -> None:
    with pytest.raises(WarmUpError, match="not finite"):
        warm_up(Engine(Broken(), SMALL))
