"""Keys divided among programs: each leaves what its part comes to, and the last to finish merges all parts.

Scores are unscaled, and -inf means no keys.
"""

import triton
import triton.language as tl


@triton.jit
def leave_part(
    sums_out,
    scales_out,
    arrivals,
    at,
    high,
    weights,
    sums,
    real,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Store what a part comes to at its place, `at`; return how many others have arrived before.

    Args:
        sums_out: [places, GROUP, DIMS] float32.
        scales_out: [places, 2, LANES] float32.
        arrivals: of these parts, int32.
        at: the place.
        high: [LANES], each query's highest score.
        weights: [LANES], its sum of weights.
        sums: [LANES, DIMS], its weighted sum of values.
        real: [LANES, 1], which queries there are.
        GROUP: most of them.
        LANES: their number, padded.
        DIMS: numbers of a head, padded.
    """
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, DIMS)
    tl.store(scales_out + at * (2 * LANES) + lanes, high)
    tl.store(scales_out + at * (2 * LANES) + LANES + lanes, weights)
    tl.store(
        sums_out + at * (GROUP * DIMS) + lanes[:, None] * DIMS + dims[None, :],
        sums,
        mask=real,
    )
    # All threads' stores precede the barrier, and the barrier precedes the atomic, which publishes them
    # (release) and makes the others' visible to the last program (acquire).
    tl.debug_barrier()
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")


@triton.jit
def merge_parts(
    sums_in,
    scales_in,
    first,
    parts,
    real,
    log2_scale,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    DIMS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the weights and sums of all parts, merged in order, of which `first` is the place.

    STEP parts are loaded at the same time; the surplus ones of the last ones change nothing.
    """
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, DIMS)
    high = tl.full([LANES], -float("inf"), tl.float32)
    weights = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, DIMS], tl.float32)
    for begin in range(0, parts, STEP):
        for step in tl.static_range(STEP):
            exists = begin + step + tl.zeros_like(lanes) < parts
            at = first + begin + step
            # Bypasses the L1 cache, which is not coherent.
            scales = scales_in + at * (2 * LANES) + lanes
            other_high = tl.load(scales, mask=exists, other=-float("inf"), cache_modifier=".cg")
            other_weights = tl.load(scales + LANES, mask=exists, other=0.0, cache_modifier=".cg")
            other_sums = tl.load(
                sums_in + at * (GROUP * DIMS) + lanes[:, None] * DIMS + dims[None, :],
                mask=real & exists[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            new = tl.maximum(high, other_high)
            keep = tl.exp2((high - new) * log2_scale)
            add = tl.exp2((other_high - new) * log2_scale)
            weights = tl.fma(weights, keep, other_weights * add)
            sums = tl.fma(sums, tl.broadcast_to(keep[:, None], sums.shape), other_sums * add[:, None])
            high = new
    return weights, sums
