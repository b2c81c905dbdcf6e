"""Calls token masks, which are foreign code: a fault in one fails only its own request."""

import logging
from collections.abc import Callable

from torch import Tensor

from triton_models.engine.sampling import TokenMask
from triton_models.engine.sequence import FinishReason, Sequence
from triton_models.errors import TokenMaskError, panics_are_errors

log = logging.getLogger(__name__)

MaskFault = tuple[FinishReason, str]
"""How the request ends, and the message for its client."""

_MASK = "a token mask"
_FAULT = "the request's token mask failed"


def fill_mask(sequence: Sequence, words: Tensor) -> MaskFault | None:
    """Let the mask of `sequence`, if any, write the allowed tokens to `words`; return the fault, if any."""
    return _ask(sequence, lambda mask: mask.fill(words))


def tell_mask(sequence: Sequence, token_id: int) -> MaskFault | None:
    """Tell the mask of `sequence`, if any, which token comes next; return the fault, if any."""
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
