"""Calls token masks, which are foreign code: a fault in one fails only its own request."""

import logging
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from triton_models.engine.sampler import MASK_BITS
from triton_models.engine.sampling import BatchedMask, TokenMask
from triton_models.engine.sequence import FinishReason, Sequence, SequenceState
from triton_models.errors import TokenMaskError, panics_are_errors

log = logging.getLogger(__name__)

MaskFault = tuple[FinishReason, str]
"""How the request ends, and the message for its client."""

_MASK = "a token mask"
_FAULT = "the request's token mask failed"


def fill_masks(masked: list[Sequence], vocabulary: int) -> tuple[Tensor | None, dict[str, MaskFault]]:
    """Let the mask of each sequence write its allowed tokens; masks of a kind that can, all at once.

    Masks of sequences that have ended are not called, and allow nothing: their tokens are dropped.

    Returns:
        The words, [M, ceil(vocabulary / 32)] int32, and the faults by request. Without sequences, None.
    """
    if not masked:
        return None, {}
    # NumPy's, since torch clears this in several threads and waits for them, for tens of milliseconds on a
    # busy machine.
    words = torch.from_numpy(np.zeros((len(masked), -(-vocabulary // MASK_BITS)), dtype=np.int32))
    kinds: dict[type, list[tuple[Sequence, Tensor]]] = defaultdict(list)
    for sequence, row in zip(masked, words, strict=True):
        if sequence.state is not SequenceState.FINISHED:
            kinds[type(sequence.request.sampling.mask)].append((sequence, row))
    faults: dict[str, MaskFault] = {}
    for entries in kinds.values():
        for sequence, fault in _fill_together(entries) if len(entries) > 1 else _fill_each(entries):
            if fault is not None:
                faults[sequence.request.request_id] = fault
    return words, faults


def _fill_each(entries: list[tuple[Sequence, Tensor]]) -> list[tuple[Sequence, MaskFault | None]]:
    return [(sequence, fill_mask(sequence, row)) for sequence, row in entries]


def _fill_together(entries: list[tuple[Sequence, Tensor]]) -> list[tuple[Sequence, MaskFault | None]]:
    """Fill masks of one kind in one call, if it can, else one after the other."""
    masks = [sequence.request.sampling.mask for sequence, _ in entries]
    if not isinstance(masks[0], BatchedMask):
        return _fill_each(entries)
    try:
        with panics_are_errors(_MASK):
            errors = masks[0].fill_all(masks, [row for _, row in entries])
    except Exception:
        # One by one, the culprit shows, and fails alone.
        log.exception("%d token masks failed together", len(entries))
        for _, row in entries:
            row.zero_()
        return _fill_each(entries)
    return [
        (sequence, None if error is None else (FinishReason.MASK, str(error)))
        for (sequence, _), error in zip(entries, errors, strict=True)
    ]


def fill_mask(sequence: Sequence, words: Tensor) -> MaskFault | None:
    """Let the mask of `sequence`, if any, write the allowed tokens to `words`; return the fault, if any."""
    return _call(sequence, lambda mask: mask.fill(words))


def tell_mask(sequence: Sequence, token_id: int) -> MaskFault | None:
    """Tell the mask of `sequence`, if any, which token comes next; return the fault, if any."""
    return _call(sequence, lambda mask: mask.accept(token_id))


def _call(sequence: Sequence, call: Callable[[TokenMask], None]) -> MaskFault | None:
    mask = sequence.request.sampling.mask
    try:
        if mask is not None:
            with panics_are_errors(_MASK):
                call(mask)
    except TokenMaskError as error:
        return FinishReason.MASK, str(error)
    except Exception:
        log.exception("the token mask of %s failed", sequence.request.request_id)
        return FinishReason.ERROR, _FAULT
    return None
