"""Draws the token of one row on the CPU: truncation, then a race between the tokens that remain.

Each token gets an exponential random number, divided by its probability. The token with the smallest result
wins, and each one wins with exactly its probability. (Taking logarithms gives the Gumbel-max trick: Maddison,
Tarlow and Minka, "A* sampling", 2014.) A token's random number is a hash of the request's seed, the position
and the token's id. So a draw depends on no order and no sum: every implementation draws the same token from
the same logits, but for rounding where two tokens are within about 1e-6 of each other. Truncation only
decides which tokens take part.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.uint32]

GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)."""

ID_STEP = 0x9E3779B9
ID_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
"""MurmurHash3's 32-bit finaliser (Appleby, public domain), with a second key added between its halves."""

UNIT = (1 - 2.0**-24) * 2.0**-32
"""Maps 0.5 to 2**32 into (0, 1), exactly in float32: what the largest number rounds to stays below 1."""

_SHORT = 8
"""A top_k of at most 1/8 of the vocabulary is found by selection; for a larger one the row is sorted."""


class Limits(NamedTuple):
    """Which tokens of a row take part: see `kept`."""

    top_k: int
    top_p: float
    min_p: float


def row_keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Numbers:
    """Return the hash of each row's seed and position, [N, 2] uint32: the low and the high half of 64 bits.

    Args:
        seeds: [N].
        positions: [N]; each position of a seed is an independent draw.
    """
    # The seed is mixed by itself first; otherwise neighbouring seeds would share their numbers, shifted.
    mixed = _mix(_mix(seeds.astype(np.uint64)) + positions.astype(np.uint64) * np.uint64(GAMMA))
    keys = np.empty((len(mixed), 2), dtype=np.uint32)
    keys[:, 0], keys[:, 1] = mixed & np.uint64(2**32 - 1), mixed >> np.uint64(32)
    return keys


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return state ^ (state >> np.uint64(31))


def exponentials(key: Numbers, ids: Numbers) -> Row:
    """Return an exponentially distributed number for each of `ids`, over 0 and finite.

    The winner of a large vocabulary has a tiny number, so tiny numbers must be many: -log(u) of a float32 u
    has none between 0 and 2**-24, and would favour unlikely tokens or exclude them. Here 32 bits are mapped
    to u in (0, 1), so that a small u keeps its full relative precision, and -log(1 - u) is taken by `log1p`.
    So no token's probability changes by more than 2**-35, and 0 and infinity never occur.

    Args:
        key: [2], a row of `row_keys`.
        ids: [N] uint32.
    """
    return _exponentials(key, ids * np.uint32(ID_STEP))


def _exponentials(key: Numbers, steps: Numbers) -> Row:
    numbers = steps + key[0]
    shifted = numbers >> np.uint32(16)
    numbers ^= shifted
    numbers *= np.uint32(ID_MULTIPLIERS[0])
    numbers ^= np.right_shift(numbers, np.uint32(13), out=shifted)
    numbers += key[1]
    numbers *= np.uint32(ID_MULTIPLIERS[1])
    numbers ^= np.right_shift(numbers, np.uint32(16), out=shifted)
    uniform = numbers.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(-UNIT)
    # NumPy's log1p takes many times as long as torch's on most CPUs.
    logarithms: Row = torch.from_numpy(uniform).log1p_().numpy()
    return np.negative(logarithms, out=logarithms)


@lru_cache(maxsize=4)
def _steps(vocabulary: int) -> Numbers:
    return np.arange(vocabulary, dtype=np.uint32) * np.uint32(ID_STEP)


def draw(scaled: Row, limits: Limits, key: Numbers) -> int:
    """Draw a token.

    Args:
        scaled: [vocabulary] logits divided by the temperature, the largest 0; -inf removes a token.
        limits: which tokens take part.
        key: [2], from `row_keys`.
    """
    if limits.min_p > 0 or limits.top_p < 1 or 0 < limits.top_k < len(scaled):
        ids = kept(scaled, limits)
        return int(ids[(np.exp(scaled[ids]) / exponentials(key, ids.astype(np.uint32))).argmax()])
    race = np.exp(scaled)
    race /= _exponentials(key, _steps(len(scaled)))
    return int(race.argmax())


def kept(scaled: Row, limits: Limits) -> Ids:
    """Return the ids that remain after min_p, then top_k, then top_p, in ascending order.

    min_p keeps tokens at least min_p times as likely as the most likely one (Nguyen et al., "Turning up the
    heat", 2024); 0 keeps all. Of these, top_k keeps the k most likely; 0 keeps all. Of those, top_p keeps the
    fewest that make up that share of their sum (Holtzman et al., "The curious case of neural text
    degeneration", 2020); 1 keeps all. Equal tokens are kept in order of id. Sums are float64.

    Args:
        scaled: [vocabulary] logits divided by the temperature, the largest 0.
        limits: the limits.
    """
    if limits.min_p:
        # The largest is 0, so exponentials are probabilities relative to the largest one.
        likely = np.flatnonzero(scaled >= np.float32(math.log(limits.min_p)))
        return likely[kept(scaled[likely], limits._replace(min_p=0.0))]
    length = len(scaled)
    top_k = limits.top_k if 0 < limits.top_k < length else 0
    if not top_k and limits.top_p == 1:
        return np.arange(length)
    # The logits that may remain, in descending order: of most rows only few need sorting.
    if not top_k:
        # The same exponentials as below: NumPy's are less precise.
        weight = float(torch.from_numpy(scaled).exp().numpy().sum(dtype=np.float64))
        # All tokens that weigh less than this together weigh less than half of what top_p leaves out.
        least = math.log((1 - limits.top_p) * weight / length / 2)
        ordered = np.sort(scaled[scaled >= least])[::-1].copy()
    elif top_k * _SHORT <= length:
        ordered = torch.from_numpy(scaled).topk(top_k).values.numpy()
    else:
        ordered = np.sort(scaled)[: -top_k - 1 : -1].copy()
    count = len(ordered)
    if limits.top_p < 1:
        cumulative = torch.from_numpy(ordered).exp().cumsum(0, dtype=torch.float64).numpy()
        target = limits.top_p * (cumulative[-1] if top_k else weight)
        # One more than the number of tokens whose sum falls short of the target.
        count = min(count, int(cumulative.searchsorted(target)) + 1)
    threshold = ordered[count - 1]
    ids = np.flatnonzero(scaled >= threshold)
    if len(ids) > count:
        equal = scaled[ids] == threshold
        ids = ids[~equal | (equal.cumsum() <= count - (len(ids) - np.count_nonzero(equal)))]
    return ids
