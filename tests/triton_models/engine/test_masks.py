import logging

import pytest
import torch

from tests.triton_models.engine.fake_model import FakeModel, request, run
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason
from triton_models.engine.settings import EngineSettings
from triton_models.errors import TokenMaskError

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


class Panic(BaseException):
    """As what Python sees of a panic in Rust: no `Exception`."""


class Failing:
    """Allows every token, until one of its calls fails."""

    def __init__(self, error: BaseException, *, at: str, after: int = 2) -> None:
        self.error = error
        self.at = at
        self.left = after

    def fill(self, words: torch.Tensor) -> None:
        self._count("fill")
        words.fill_(-1)

    def accept(self, token_id: int) -> None:
        self._count("accept")

    def _count(self, at: str) -> None:
        if at == self.at:
            self.left -= 1
            if self.left < 0:
                raise self.error


@pytest.mark.parametrize("at", ["fill", "accept"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TokenMaskError("stuck"), "stuck"),
        (ZeroDivisionError("secret"), "the request's token mask failed"),
        (Panic("secret"), "the request's token mask failed"),
    ],
)
def test_whatever_a_mask_raises_is_its_own_requests_error(
    at: str, error: BaseException, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("free", [4, 5, 6]))
    engine.add(request("held", [4, 5, 6], SamplingParams(max_tokens=9, mask=Failing(error, at=at))))
    with caplog.at_level(logging.ERROR):
        outputs = run(engine)
    assert outputs["free"][-1].finish_reason is FinishReason.LENGTH
    blamed = FinishReason.MASK if isinstance(error, TokenMaskError) else FinishReason.ERROR
    assert outputs["held"][-1].finish_reason is blamed
    assert outputs["held"][-1].error == told
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert bool(logged) is not isinstance(error, TokenMaskError)
    assert engine.stats().failed_steps == 0
