"""Calls token masks, which are foreign code: a fault in one fails only its own request."""

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from triton_models.engine.sampler import MASK_BITS
from triton_models.engine.sampling import TokenMask
from triton_models.engine.sequence import FinishReason, Sequence, SequenceState
from triton_models.errors import TokenMaskError
from triton_models.foreign import panics_are_errors

log = logging.getLogger(__name__)

MaskFault = tuple[FinishReason, str]
"""How the request ends, and the message for its client."""

_MASK = "a token mask"
_FAULT = "the request's token mask failed"

_HELPERS = min(max((os.cpu_count() or 1) - 1, 1), 7)
"""Threads that fill masks beside the engine's own: a mask that computes without the interpreter's lock, as a
grammar's does, then takes a core of its own."""


def fill_masks(masked: list[Sequence], vocabulary: int) -> tuple[Tensor | None, dict[str, MaskFault]]:
    """Let the mask of each sequence write its allowed tokens, several at the same time.

    Masks of sequences that have ended are not called, and allow nothing: their tokens are dropped.

    Returns:
        The words, [M, ceil(vocabulary / 32)] int32, and the faults by request. Without sequences, None.
    """
    if not masked:
        return None, {}
    words = torch.zeros((len(masked), -(-vocabulary // MASK_BITS)), dtype=torch.int32)
    work = deque(
        (sequence, row)
        for sequence, row in zip(masked, words, strict=True)
        if sequence.state is not SequenceState.FINISHED
    )
    faults: dict[str, MaskFault] = {}

    def fill() -> None:
        # Masks write in place, to tensors that may have been created in inference mode, which is per thread.
        with torch.inference_mode():
            while work:
                try:
                    sequence, row = work.popleft()
                except IndexError:  # another thread has taken the last one
                    return
                if (fault := fill_mask(sequence, row)) is not None:
                    faults[sequence.request.request_id] = fault

    # This thread starts at once and waits only for masks that others have started: one mask needs no other
    # thread, and a few quick ones cost no change of threads.
    helpers = [_pool().submit(fill) for _ in range(min(_HELPERS, len(work) - 1))]
    fill()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    return words, faults


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, thread_name_prefix="mask")


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
