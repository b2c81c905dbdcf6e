"""From logits to tokens in two launches, or three where rows are truncated; nothing is sorted.

The rules are those of `triton_models.engine.sampler`: the lowest id among the most likely, or the first id in
vocabulary order whose cumulative probability exceeds a random number. Weights are float32; their sums are
float64 and added in a fixed order, so a row's token depends only on its own logits and parameters. The plain
sampler rounds probabilities differently, so the two can differ where the random number is that close to the
boundary between two tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.drawing import (
    COLDEST,
    first_over,
    inverse,
    load_usable,
    uniform,
    weights_beside,
)
from triton_models.engine.kernels.truncation import Truncation, draw_truncated

_BLOCK = 4096
"""Logits per program: so many that a row has few blocks, whose sums one program can go through."""


def choose(
    logits: Tensor,
    *,
    temperatures: Tensor,
    seeds: Tensor,
    counters: Tensor,
    truncation: Truncation | None = None,
) -> Tensor:
    """Choose a token per row.

    Compiled once for each dtype of the logits and size of the vocabulary, provided that the address of
    `logits` is a multiple of 16 and `counters` always have the same dtype.

    Args:
        logits: [S, V], contiguous, of any float dtype; -inf removes a token.
        temperatures: [S] float32; below `GREEDY_BELOW` a row takes its most likely token.
        seeds: [S] int64.
        counters: [S] int64 or int32, not negative; each is an independent draw of its row's seed.
        truncation: the rows with limits; None: there are none.

    Returns:
        [3, S] int64, as `SamplerOutputs.status`: token ids, whether all logits are finite (a caller that
        removes tokens must check this before), and whether any token can be chosen. If one of the two does
        not hold, the token is an arbitrary id of the vocabulary.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    device = logits.device
    status = torch.empty((3, rows), dtype=torch.int64, device=device)
    peaks = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    sums = torch.empty((rows, blocks), dtype=torch.float64, device=device)
    places = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    finite = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    _summarise[rows, blocks](
        logits,
        temperatures,
        peaks,
        sums,
        places,
        finite,
        VOCABULARY=vocabulary,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _choose[(rows,)](
        logits,
        temperatures,
        seeds,
        counters,
        peaks,
        sums,
        places,
        finite,
        status,
        rows,
        VOCABULARY=vocabulary,
        BLOCK=_BLOCK,
        BLOCKS=blocks,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        num_warps=8,
    )
    if truncation is not None:
        draw_truncated(logits, temperatures, seeds, counters, peaks, truncation, status[0])
    return status


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _summarise(
    logits, temperatures, peaks, sums, places, finite, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    """Find a block's largest logit, the lowest id that has it, the sum of weights, and if all are finite."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = load_usable(logits + row.to(tl.int64) * VOCABULARY, ids, VOCABULARY)
    peak, place = tl.max(values, 0, return_indices=True)
    weights = weights_beside(values, peak, inverse(tl.load(temperatures + row)))
    usable = (values > float("-inf")) | (ids >= VOCABULARY)
    here = row * tl.num_programs(1) + block
    tl.store(peaks + here, peak)
    tl.store(sums + here, tl.sum(weights.to(tl.float64), 0))
    tl.store(places + here, block * BLOCK + place)
    tl.store(finite + here, tl.min(usable.to(tl.int32), 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["temperatures", "seeds", "counters"])
def _choose(
    logits,
    temperatures,
    seeds,
    counters,
    peaks,
    sums,
    places,
    finite,
    status,
    rows,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    """Choose a row's token from the summaries of its blocks, reading only the block that holds the token."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS_PADDED)
    listed = blocks < BLOCKS
    there = row * BLOCKS + blocks
    block_peaks = tl.load(peaks + there, mask=listed, other=float("-inf"))
    peak = tl.max(block_peaks, 0)
    firsts = tl.load(places + there, mask=listed, other=VOCABULARY)
    token = tl.min(tl.where(block_peaks == peak, firsts, VOCABULARY), 0)
    temperature = tl.load(temperatures + row)
    if temperature >= COLDEST:
        coldness = inverse(temperature)
        scales = weights_beside(block_peaks.to(tl.float64), peak.to(tl.float64), coldness.to(tl.float64))
        weights = tl.load(sums + there, mask=listed, other=0.0) * scales
        reached = tl.cumsum(weights, 0)
        target = uniform(tl.load(seeds + row), tl.load(counters + row)) * tl.max(reached, 0)
        chosen = first_over(weights, target, blocks)
        here = blocks == chosen
        scale = tl.sum(tl.where(here, scales, 0.0), 0)
        left = (target - tl.sum(tl.where(here, reached - weights, 0.0), 0)) / tl.where(scale > 0, scale, 1.0)
        block_peak = tl.max(tl.where(here, block_peaks, float("-inf")), 0)
        ids = chosen * BLOCK + tl.arange(0, BLOCK)
        values = load_usable(logits + row.to(tl.int64) * VOCABULARY, ids, VOCABULARY)
        token = first_over(weights_beside(values, block_peak, coldness), left, ids)
    tl.store(status + row, tl.minimum(token, VOCABULARY - 1).to(tl.int64))
    all_finite = tl.min(tl.load(finite + there, mask=listed, other=1), 0)
    tl.store(status + rows + row, all_finite.to(tl.int64))
    tl.store(status + 2 * rows + row, (peak > float("-inf")).to(tl.int64))
