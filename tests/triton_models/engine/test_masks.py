import logging
from collections.abc import Sequence as Tokens
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.triton_models.engine.fake_model import FakeModel, NearMask, request, run
from triton_models.engine.engine import Engine
from triton_models.engine.masks import fill_masks
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Sequence, SequenceState
from triton_models.engine.settings import EngineSettings
from triton_models.errors import TokenMaskError

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


class Panic(BaseException):
    """As what Python sees of a panic in Rust: no `Exception`."""


class Failing(NearMask):
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


class Together(Failing):
    """Allows only its own token; many can be filled in one call, of which the calls are counted."""

    calls: ClassVar[list[int]] = []
    """Number of masks of each call."""

    def __init__(self, token: int, error: BaseException | None = None) -> None:
        super().__init__(error or TokenMaskError(""), at="fill", after=0 if error else 10**6)
        self.token = token

    def fill(self, words: torch.Tensor) -> None:
        self._count("fill")
        words[self.token // 32] |= 1 << self.token % 32

    @classmethod
    def fill_all(
        cls, masks: list["Together"], words: torch.Tensor, rows: list[int]
    ) -> list[TokenMaskError | None]:
        cls.calls.append(len(masks))
        errors: list[TokenMaskError | None] = []
        for mask, row in zip(masks, rows, strict=True):
            try:
                mask.fill(words[row])
            except TokenMaskError as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors


def masked(count: int, *, broken: BaseException | None = None) -> list[Sequence]:
    """Running sequences with masks that are filled together, of which the second may be broken."""
    Together.calls.clear()
    return [
        Sequence(
            request(str(number), [1], SamplingParams(mask=Together(number, broken if number == 1 else None))),
            arrival=0,
            arrived_at=0.0,
            max_tokens=8,
        )
        for number in range(count)
    ]


def allowed(words: torch.Tensor) -> list[list[int]]:
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def test_masks_of_one_kind_are_filled_in_one_call() -> None:
    words, faults = fill_masks(masked(60), {}, 60)
    assert words.shape == (60, 2)
    assert allowed(words) == [[number] for number in range(60)]
    assert Together.calls == [60]
    assert not faults


def test_one_mask_needs_no_call_for_many() -> None:
    words, _ = fill_masks(masked(1), {}, 60)
    assert allowed(words) == [[0]]
    assert not Together.calls


def test_without_masks_there_is_nothing() -> None:
    assert fill_masks([], {}, 60) == (None, {})


def test_masks_of_ended_requests_are_not_called() -> None:
    sequences = masked(3)
    sequences[0].move_to(SequenceState.FINISHED)
    words, _ = fill_masks(sequences, {}, 60)
    assert allowed(words) == [[], [1], [2]]
    assert Together.calls == [2]


class Alternating(Together):
    """Allows its token and the next in turn, and can look ahead until that fails."""

    def __init__(self, token: int, *, rows: int = 60) -> None:
        super().__init__(token)
        self.rows = rows

    def fill_ahead(self, tokens: Tokens[int], rows: Tokens[torch.Tensor]) -> None:
        for at, (_, row) in enumerate(zip(tokens, rows, strict=True), 1):
            if at > self.rows:
                raise TokenMaskError("too far")
            row[0] |= 1 << self.token + at % 2


def test_rows_after_guesses_are_filled_ahead_and_no_fault_if_they_cannot_be() -> None:
    def sequence(mask: Any) -> Sequence:
        made = request(str(id(mask)), [1], SamplingParams(mask=mask))
        return Sequence(made, arrival=0, arrived_at=0.0, max_tokens=8)

    free, first, other = sequence(None), sequence(Alternating(3)), sequence(Alternating(8, rows=1))
    sampling = [first, first, first, free, free, other, other, other]
    followed = {1: (1, 3), 2: (2, 4), 4: (1, 9), 6: (1, 8), 7: (2, 9)}
    Together.calls.clear()
    words, faults = fill_masks(sampling, followed, 60)
    assert words is not None
    assert allowed(words) == [[3], [4], [3], [8], [], []]
    assert Together.calls == [2]
    assert not faults
    other.move_to(SequenceState.FINISHED)
    words, _ = fill_masks(sampling, followed, 60)
    assert words is not None
    assert allowed(words) == [[3], [4], [3], [], [], []]


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (TokenMaskError("stuck"), (FinishReason.MASK, "stuck")),
        # Nobody knows then whose it was, until each is called for itself.
        (ZeroDivisionError("secret"), (FinishReason.ERROR, "the request's token mask failed")),
        (Panic("secret"), (FinishReason.ERROR, "the request's token mask failed")),
    ],
)
def test_a_mask_that_fails_among_others_fails_alone(
    broken: BaseException, fault: tuple[FinishReason, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        words, faults = fill_masks(masked(4, broken=broken), {}, 60)
    assert faults == {"1": fault}
    assert [row for number, row in enumerate(allowed(words)) if number != 1] == [[0], [2], [3]]
    assert Together.calls == [4]
