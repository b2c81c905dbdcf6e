"""Calls token masks, which are foreign code: a fault in one fails only its own request."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from operator import methodcaller

import torch
from torch import Tensor

from triton_models.engine.sampler import MASK_BITS
from triton_models.engine.sampling import BatchedMask, TokenMask
from triton_models.engine.sequence import Fault, FinishReason, Sequence, SequenceState
from triton_models.errors import TokenMaskError, panics_are_errors

log = logging.getLogger(__name__)

_MASK = "a token mask"


def fill_masks(
    sampling: list[Sequence], followed: Mapping[int, tuple[int, int]], vocabulary: int, *, pin: bool = False
) -> tuple[Tensor | None, dict[str, Fault]]:
    """Let the mask of each sequence write its allowed tokens; masks of a kind that can, all at once.

    Masks of sequences that have ended are not called, and allow nothing: their tokens are dropped.

    Args:
        sampling: as in `Step`.
        followed: as in `Step`; a mask that fails in such a row allows nothing there, which is no fault yet.
        vocabulary: number of tokens.
        pin: whether the words are to be in pinned memory.

    Returns:
        The words of the M rows with masks, [M, ceil(vocabulary / 32)] int32, and the faults by request.
        Without such rows, None.
    """
    masked = [row for row, each in enumerate(sampling) if each.masked]
    if not masked:
        return None, {}
    words = torch.empty((len(masked), -(-vocabulary // MASK_BITS)), dtype=torch.int32, pin_memory=pin)
    # NumPy clears this, since torch does so in several threads and waits for them, for tens of milliseconds
    # on a busy machine.
    words.numpy().fill(0)
    kinds: dict[type, list[tuple[Sequence, int]]] = defaultdict(list)
    ahead: dict[Sequence, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, row in enumerate(masked):
        sequence = sampling[row]
        if sequence.state is SequenceState.FINISHED:
            continue
        if row in followed:
            ahead[sequence].append((followed[row][1], words[place]))
        else:
            kinds[type(sequence.request.sampling.mask)].append((sequence, place))
    faults: dict[str, Fault] = {}
    for entries in kinds.values():
        if len(entries) == 1 or not _fill_together(entries, words, faults):
            for sequence, place in entries:
                if (fault := _call(sequence, methodcaller("fill", words[place]))) is not None:
                    faults[sequence.request.request_id] = fault
    for sequence, places in ahead.items():
        _fill_ahead(sequence, *zip(*places, strict=True))
    return words, faults


def _fill_ahead(sequence: Sequence, guesses: tuple[int, ...], rows: tuple[Tensor, ...]) -> None:
    """Fill the rows after a sequence's guesses; a mask that fails allows nothing there."""
    if _call(sequence, methodcaller("fill_ahead", guesses, rows)) is not None:
        for row in rows:
            row.zero_()


def _fill_together(entries: list[tuple[Sequence, int]], words: Tensor, faults: dict[str, Fault]) -> bool:
    """Fill masks of one kind in one call, and note their faults; False if it cannot be done or told whose."""
    masks = [sequence.request.sampling.mask for sequence, _ in entries]
    if not isinstance(masks[0], BatchedMask):
        return False
    try:
        with panics_are_errors(_MASK):
            errors = masks[0].fill_all(masks, words, [place for _, place in entries])
    except Exception:
        # One by one, the culprit shows, and fails alone.
        log.exception("%d token masks failed together", len(entries))
        for _, place in entries:
            words[place].zero_()
        return False
    for (sequence, _), error in zip(entries, errors, strict=True):
        if error is not None:
            faults[sequence.request.request_id] = FinishReason.MASK, str(error)
    return True


def tell_mask(sequence: Sequence, token_id: int) -> Fault | None:
    """Tell the mask of `sequence`, if any, which token comes next; return the fault, if any."""
    return _call(sequence, methodcaller("accept", token_id))


def _call(sequence: Sequence, call: Callable[[TokenMask], None]) -> Fault | None:
    mask = sequence.request.sampling.mask
    if mask is None:
        return None
    try:
        with panics_are_errors(_MASK):
            call(mask)
    except TokenMaskError as error:
        return FinishReason.MASK, str(error)
    except Exception:
        log.exception("the token mask of %s failed", sequence.request.request_id)
        return FinishReason.ERROR, "the request's token mask failed"
    return None
