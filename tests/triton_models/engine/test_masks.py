import logging
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.triton_models.engine.fake_model import FakeModel, NearMask, request, run
from triton_models.engine.engine import Engine
from triton_models.engine.masks import fill_masks, tell_masks
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Sequence, SequenceState
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Sampled
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
    """Allows only its own token; many are filled or told in one call, of which the calls are counted."""

    calls: ClassVar[list[int]] = []
    """Number of masks of each call."""

    def __init__(self, token: int, error: BaseException | None = None, *, at: str = "fill") -> None:
        super().__init__(error or TokenMaskError(""), at=at, after=0 if error else 10**6)
        self.token = token
        self.told: list[int] = []

    def fill(self, words: torch.Tensor) -> None:
        self._count("fill")
        words[self.token // 32] |= 1 << self.token % 32

    def accept(self, token_id: int) -> None:
        self._count("accept")
        self.told.append(token_id)

    @classmethod
    def fill_all(
        cls, masks: list["Together"], words: torch.Tensor, rows: list[int]
    ) -> list[TokenMaskError | None]:
        return cls._each([partial(mask.fill, words[row]) for mask, row in zip(masks, rows, strict=True)])

    @classmethod
    def accept_all(cls, masks: list["Together"], token_ids: list[int]) -> list[TokenMaskError | None]:
        return cls._each([partial(mask.accept, token) for mask, token in zip(masks, token_ids, strict=True)])

    @classmethod
    def _each(cls, doing: list[Callable[[], None]]) -> list[TokenMaskError | None]:
        cls.calls.append(len(doing))
        errors: list[TokenMaskError | None] = []
        for do in doing:
            try:
                do()
            except TokenMaskError as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors


def masked(count: int, *, broken: BaseException | None = None, at: str = "fill") -> list[Sequence]:
    """Running sequences with masks that are called together, of which the second may be broken."""
    Together.calls.clear()
    masks = [Together(number, broken if number == 1 else None, at=at) for number in range(count)]
    return [
        Sequence(
            request(str(number), [1], SamplingParams(mask=mask)), arrival=0, arrived_at=0.0, max_tokens=8
        )
        for number, mask in enumerate(masks)
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
    (one,) = masked(1)
    words, _ = fill_masks([one], {}, 60)
    assert allowed(words) == [[0]]
    assert tell_masks([Sampled(one, 7)]) == {}
    assert told([one]) == [[7]]
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
    assert [(each.request.request_id, why) for each, why in faults.items()] == [("1", fault)]
    assert [row for number, row in enumerate(allowed(words)) if number != 1] == [[0], [2], [3]]
    assert Together.calls == [4]


def told(sequences: list[Sequence]) -> list[list[int]]:
    masks = [each.request.sampling.mask for each in sequences]
    return [mask.told for mask in masks if isinstance(mask, Together)]


def test_masks_of_one_kind_are_told_in_one_call() -> None:
    sequences = masked(60)
    assert tell_masks(Sampled(each, number) for number, each in enumerate(sequences)) == {}
    assert told(sequences) == [[number] for number in range(60)]
    assert Together.calls == [60]


def test_several_tokens_of_a_mask_are_told_in_order() -> None:
    sequences = masked(3)
    first, second, third = sequences
    found = [(first, 7), (first, 8), (first, 9), (second, 4), (third, 5), (third, 6)]
    assert tell_masks(Sampled(*each) for each in found) == {}
    assert told(sequences) == [[7, 8, 9], [4], [5, 6]]
    assert Together.calls == [3, 2]


def test_only_masks_of_requests_that_go_on_are_told() -> None:
    sequences = masked(3)
    sequences[0].move_to(SequenceState.FINISHED)
    free = Sequence(request("free", [1]), arrival=0, arrived_at=0.0, max_tokens=8)
    found = [Sampled(sequences[0], 3), Sampled(sequences[1], 3), Sampled(sequences[2]), Sampled(free, 3)]
    assert tell_masks(found) == {}
    assert told(sequences) == [[], [3], []]


def test_a_mask_that_fails_among_others_is_told_no_more() -> None:
    sequences = masked(3, broken=TokenMaskError("stuck"), at="accept")
    faults = tell_masks(Sampled(each, token) for each in sequences for token in (4, 5))
    assert faults == {sequences[1]: (FinishReason.MASK, "stuck")}
    assert told(sequences) == [[4, 5], [], [4, 5]]
    assert Together.calls == [3, 2]


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), Panic("secret")])
def test_masks_that_were_told_together_end_together_if_it_is_unknown_which_failed(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    sequences = masked(3, broken=error, at="accept")
    with caplog.at_level(logging.CRITICAL):
        faults = tell_masks(Sampled(each, 4) for each in sequences)
    assert faults == dict.fromkeys(sequences, (FinishReason.ERROR, "the request's token mask failed"))
