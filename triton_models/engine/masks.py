"""Asking token masks: the boundary to foreign code, whose every fault is its own request's alone."""

import logging
from collections.abc import Callable

from torch import Tensor

from triton_models.engine.sampling import TokenMask
from triton_models.engine.sequence import FinishReason, Sequence
from triton_models.errors import TokenMaskError
from triton_models.foreign import panics_are_errors

log = logging.getLogger(__name__)

MaskFault = tuple[FinishReason, str]
"""How the request ends, and what its client is told."""

_MASK = "a token mask"
_FAULT = "the request's token mask failed"


def fill_mask(sequence: Sequence, words: Tensor) -> MaskFault | None:
    """Have the mask of `sequence`, if it has one, write the allowed tokens; returns what went wrong."""
    return _ask(sequence, lambda mask: mask.fill(words))


def tell_mask(sequence: Sequence, token_id: int) -> MaskFault | None:
    """Tell the mask of `sequence`, if it has one, of a token to go on behind; returns what went wrong."""
    return _ask(sequence, lambda mask: mask.accept(token_id))


def _ask(sequence: Sequence, ask: Callable[[TokenMask], None]) -> MaskFault | None:
    mask = sequence.request.sampling.mask
    try:
        if mask is not None:
            with panics_are_errors(_MASK):
                ask(mask)
    except TokenMaskError as error:
        return FinishReason.MASK, str(error)
    except Exception:
        log.exception("the token mask of %s failed", sequence.request.request_id)
        return FinishReason.ERROR, _FAULT
    return None
