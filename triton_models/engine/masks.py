"""Asking token masks: the boundary to foreign code, whose every fault is its own request's alone."""

import logging

from torch import Tensor

from triton_models.engine.sequence import FinishReason, Sequence
from triton_models.errors import TokenMaskError
from triton_models.foreign import panics_are_errors

log = logging.getLogger(__name__)

MaskFault = tuple[FinishReason, str]
"""How the request ends, and what its client is told."""

_MASK = "a token mask"
_FAULT = "the request's token mask failed"


def fill_mask(sequence: Sequence, words: Tensor) -> MaskFault | None:
    """Have the mask of `sequence` write the allowed tokens; returns what went wrong."""
    mask = sequence.request.sampling.mask
    try:
        if mask is not None:
            with panics_are_errors(_MASK):
                mask.fill(words)
    except Exception as error:  # noqa: BLE001 - see the module
        return _told(sequence, error)
    return None


def tell_mask(sequence: Sequence, token_id: int) -> MaskFault | None:
    """Tell the mask of `sequence`, if it has one, of a token to go on behind; returns what went wrong."""
    mask = sequence.request.sampling.mask
    try:
        if mask is not None:
            with panics_are_errors(_MASK):
                mask.accept(token_id)
    except Exception as error:  # noqa: BLE001 - see the module
        return _told(sequence, error)
    return None


def _told(sequence: Sequence, error: Exception) -> MaskFault:
    if isinstance(error, TokenMaskError):
        return FinishReason.MASK, str(error)
    log.error("the token mask of %s failed", sequence.request.request_id, exc_info=error)
    return FinishReason.ERROR, _FAULT
