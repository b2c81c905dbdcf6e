"""Calls token masks, which are foreign code: a fault in one fails only its own request."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import methodcaller

import torch
from torch import Tensor

from triton_models.engine.sampler import MASK_BITS
from triton_models.engine.sampling import BatchedMask, TokenMask
from triton_models.engine.sequence import Fault, FinishReason, Sequence, SequenceState
from triton_models.engine.step import Sampled
from triton_models.errors import TokenMaskError, panics_are_errors

log = logging.getLogger(__name__)

_MASK = "a token mask"
_FAILED: Fault = (FinishReason.ERROR, "the request's token mask failed")


def fill_masks(
    sampling: list[Sequence], followed: Mapping[int, tuple[int, int]], vocabulary: int, *, pin: bool = False
) -> tuple[Tensor | None, dict[Sequence, Fault]]:
    """Let the mask of each sequence write its allowed tokens; masks of a kind that can, all at once.

    Masks of sequences that have ended are not called, and allow nothing: their tokens are dropped.

    Args:
        sampling: as in `Step`.
        followed: as in `Step`; a mask that fails in such a row allows nothing there, which is no fault yet.
        vocabulary: number of tokens.
        pin: whether the words are to be in pinned memory.

    Returns:
        The words of the M rows with masks, [M, ceil(vocabulary / 32)] int32, and the faults. Without such
        rows, None.
    """
    masked = [row for row, each in enumerate(sampling) if each.masked]
    if not masked:
        return None, {}
    words = torch.empty((len(masked), -(-vocabulary // MASK_BITS)), dtype=torch.int32, pin_memory=pin)
    # NumPy clears this, since torch does so in several threads and waits for them, for tens of milliseconds
    # on a busy machine.
    words.numpy().fill(0)
    entries: list[tuple[Sequence, int]] = []
    ahead: dict[Sequence, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, row in enumerate(masked):
        sequence = sampling[row]
        if sequence.state is SequenceState.FINISHED:
            continue
        if row in followed:
            ahead[sequence].append((followed[row][1], words[place]))
        else:
            entries.append((sequence, place))
    faults = _fill(entries, words)
    for sequence, places in ahead.items():
        guesses, following = zip(*places, strict=True)
        if _call(sequence, methodcaller("fill_ahead", guesses, following)) is not None:
            for each in following:
                each.zero_()
    return words, faults


def _fill(entries: list[tuple[Sequence, int]], words: Tensor) -> dict[Sequence, Fault]:
    """Fill the row of each sequence; return the faults."""
    faults: dict[Sequence, Fault] = {}
    for kind, alike in _kinds(entries):
        if kind is not None:
            rows = [row for _, row in alike]
            if (together := _together(alike, partial(kind.fill_all, words=words, rows=rows))) is not None:
                faults |= together
                continue
            words[rows] = 0  # one by one, the culprit shows, and fails alone
        for sequence, row in alike:
            if (fault := _call(sequence, methodcaller("fill", words[row]))) is not None:
                faults[sequence] = fault
    return faults


def tell_masks(results: Iterable[Sampled]) -> dict[Sequence, Fault]:
    """Tell the masks of sequences that go on the tokens that a step found; return the faults.

    Masks of a kind that can are told all at once; of several tokens for one, the first ones before the next.
    """
    turns: list[list[tuple[Sequence, int]]] = []
    found: dict[Sequence, int] = defaultdict(int)
    for each in results:
        sequence = each.sequence
        if each.token_id is None or not sequence.masked or sequence.state is SequenceState.FINISHED:
            continue
        if found[sequence] == len(turns):
            turns.append([])
        turns[found[sequence]].append((sequence, each.token_id))
        found[sequence] += 1
    faults: dict[Sequence, Fault] = {}
    for turn in turns:
        for kind, alike in _kinds([each for each in turn if each[0] not in faults]):
            if kind is not None:
                sequences, tokens = zip(*alike, strict=True)
                together = _together(alike, partial(kind.accept_all, token_ids=tokens))
                faults |= dict.fromkeys(sequences, _FAILED) if together is None else together
                continue
            for sequence, token_id in alike:
                if (fault := _call(sequence, methodcaller("accept", token_id))) is not None:
                    faults[sequence] = fault
    return faults


def _kinds(
    entries: list[tuple[Sequence, int]],
) -> list[tuple[type[BatchedMask] | None, list[tuple[Sequence, int]]]]:
    """Return the entries by the kind of their masks; None: each of them is called alone."""
    kinds: dict[type, list[tuple[Sequence, int]]] = defaultdict(list)
    for entry in entries:
        kinds[type(entry[0].request.sampling.mask)].append(entry)
    # Looking for the methods of each mask would take as long as filling it.
    return [
        (kind if len(alike) > 1 and issubclass(kind, BatchedMask) else None, alike)
        for kind, alike in kinds.items()
    ]


def _together(
    entries: list[tuple[Sequence, int]],
    call: Callable[[list[TokenMask | None]], Iterable[TokenMaskError | None]],
) -> dict[Sequence, Fault] | None:
    """Call masks of one kind all at once; return the faults, or None if it is unknown whose they are."""
    try:
        with panics_are_errors(_MASK):
            errors = call([sequence.request.sampling.mask for sequence, _ in entries])
    except Exception:
        log.exception("%d token masks failed together", len(entries))
        return None
    return {
        sequence: (FinishReason.MASK, str(error))
        for (sequence, _), error in zip(entries, errors, strict=True)
        if error is not None
    }


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
        return _FAILED
    return None
