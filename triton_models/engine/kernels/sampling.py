"""From logits to tokens in two launches, or three where rows are truncated; nothing is sorted.

The rules are those of `triton_models.engine.sampler`: the lowest id among the most likely, or the winner of
the race that `triton_models.engine.draw` defines, with the same random numbers. Each part of a row has a
winner of its own, so one pass over the logits is enough, and a row's token depends only on its own logits and
parameters. Logarithms and exponentials are rounded differently than on the CPU, so the token can differ
where two tokens are within about 1e-6 of each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine import draw
from triton_models.engine.kernels.threshold import load_usable, weights_beside
from triton_models.engine.kernels.truncation import find_limits, inverse
from triton_models.engine.sampler import SamplerInputs
from triton_models.engine.sampling import GREEDY_BELOW

_BLOCK = 4096
"""Logits per program: so many that a row has few blocks, whose winners one program can compare."""

_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)
_GAMMA: tl.constexpr = tl.constexpr(draw.GAMMA)
_FIRST_MULTIPLIER: tl.constexpr = tl.constexpr(draw.MULTIPLIERS[0])
_SECOND_MULTIPLIER: tl.constexpr = tl.constexpr(draw.MULTIPLIERS[1])
_ID_STEP: tl.constexpr = tl.constexpr(draw.ID_STEP)
_FIRST_ID_MULTIPLIER: tl.constexpr = tl.constexpr(draw.ID_MULTIPLIERS[0])
_SECOND_ID_MULTIPLIER: tl.constexpr = tl.constexpr(draw.ID_MULTIPLIERS[1])
_UNIT: tl.constexpr = tl.constexpr(draw.UNIT)


def choose(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Choose a token per row; a `Chooser`.

    Compiled once for each dtype of the logits and size of the vocabulary, provided that the address of
    `logits` is a multiple of 16 and `inputs.counters` always have the same dtype.

    Args:
        logits: [S, V], contiguous, float32, float16 or bfloat16; -inf removes a token.
        inputs: the rows' rules; `counters` may be int32, too, and must not be negative.

    Returns:
        [3, S] int64, as `SamplerOutputs.status`: token ids, whether all logits are finite (a caller that
        removes tokens must check this before), and whether any token can be chosen. If one of the two does
        not hold, the token is an arbitrary id of the vocabulary.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    floors, last_ids = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.int32)
    if inputs.truncated:
        find_limits(logits, inputs, floors, last_ids)
    peaks, places = empty(rows, blocks, dtype=torch.float32), empty(rows, blocks, dtype=torch.int32)
    results, winners = empty(rows, blocks, dtype=torch.float32), empty(rows, blocks, dtype=torch.int32)
    finite = empty(rows, blocks, dtype=torch.int32)
    _race[rows, blocks](
        logits,
        inputs.temperatures,
        inputs.seeds,
        inputs.counters,
        floors,
        last_ids,
        int(inputs.truncated),
        peaks,
        places,
        results,
        winners,
        finite,
        VOCABULARY=vocabulary,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    status = empty(3, rows, dtype=torch.int64)
    _choose[(rows,)](
        inputs.temperatures,
        peaks,
        places,
        results,
        winners,
        finite,
        status,
        rows,
        BLOCKS=blocks,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        num_warps=1,
    )
    return status


@triton.jit
def exponentials(seed, counter, ids):
    """Return the numbers of `draw.exponentials`, from the same bits."""
    state = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + counter.to(tl.uint64) * _GAMMA)
    numbers = ids.to(tl.uint32) * _ID_STEP + state.to(tl.uint32)
    numbers = (numbers ^ (numbers >> 16)) * _FIRST_ID_MULTIPLIER
    numbers = ((numbers ^ (numbers >> 13)) + (state >> 32).to(tl.uint32)) * _SECOND_ID_MULTIPLIER
    u = ((numbers ^ (numbers >> 16)).to(tl.float32) + 0.5) * _UNIT
    rest = 1.0 - u
    # -log(1 - u): what `rest` has rounded away, which is all of a tiny u, is added to its logarithm.
    return (u - (1.0 - rest)) - tl.log(rest)


@triton.jit
def _mix(state):
    state = state + _GAMMA
    state = (state ^ (state >> 30)) * _FIRST_MULTIPLIER
    state = (state ^ (state >> 27)) * _SECOND_MULTIPLIER
    return state ^ (state >> 31)


@triton.jit(
    do_not_specialize=["limited"], do_not_specialize_on_alignment=["temperatures", "seeds", "counters"]
)
def _race(
    logits,
    temperatures,
    seeds,
    counters,
    floors,
    last_ids,
    limited,
    peaks,
    places,
    results,
    winners,
    finite,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find a block's largest logit, the lowest id that has it, its winner, and if all logits are finite."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = load_usable(logits + row.to(tl.int64) * VOCABULARY, ids, VOCABULARY)
    peak, place = tl.max(values, 0, return_indices=True)
    usable = (values > float("-inf")) | (ids >= VOCABULARY)
    here = row * tl.num_programs(1) + block
    tl.store(peaks + here, peak)
    tl.store(places + here, block * BLOCK + place)
    tl.store(finite + here, tl.min(usable.to(tl.int32), 0))
    temperature = tl.load(temperatures + row)
    if temperature >= _GREEDY_BELOW:
        if limited != 0:
            floor = tl.load(floors + row)
            kept = (values > floor) | ((values == floor) & (ids <= tl.load(last_ids + row)))
            values = tl.where(kept, values, float("-inf"))
        weights = weights_beside(values, peak, inverse(temperature))
        race = weights / exponentials(tl.load(seeds + row), tl.load(counters + row), ids)
        result, winner = tl.max(race, 0, return_indices=True)
        tl.store(results + here, result)
        tl.store(winners + here, block * BLOCK + winner)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["temperatures"])
def _choose(
    temperatures,
    peaks,
    places,
    results,
    winners,
    finite,
    status,
    rows,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    """Choose a row's token from those of its blocks."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS_PADDED)
    listed = blocks < BLOCKS
    there = row * BLOCKS + blocks
    block_peaks = tl.load(peaks + there, mask=listed, other=float("-inf"))
    peak, chosen = tl.max(block_peaks, 0, return_indices=True)
    token = tl.load(places + row * BLOCKS + chosen)
    temperature = tl.load(temperatures + row)
    if temperature >= _GREEDY_BELOW:
        race = tl.load(results + there, mask=listed, other=0.0)
        race *= weights_beside(block_peaks, peak, inverse(temperature))
        _, chosen = tl.max(race, 0, return_indices=True)
        token = tl.load(winners + row * BLOCKS + chosen)
    tl.store(status + row, token.to(tl.int64))
    all_finite = tl.min(tl.load(finite + there, mask=listed, other=1), 0)
    tl.store(status + rows + row, all_finite.to(tl.int64))
    tl.store(status + 2 * rows + row, (peak > float("-inf")).to(tl.int64))
