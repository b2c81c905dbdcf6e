"""The rotation of queries and keys as its definition says it, to compare with."""

from torch import Tensor


def rotate_in_place(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate pairs of [T, heads, head_dim] by [T, 1, pairs], with every product and sum rounded by itself."""
    rotary = heads[..., : 2 * cos.shape[-1]]
    even, odd = rotary[..., 0::2].float(), rotary[..., 1::2].float()
    rotated_even, rotated_odd = even * cos - odd * sin, odd * cos + even * sin
    rotary[..., 0::2] = rotated_even.to(heads.dtype)
    rotary[..., 1::2] = rotated_odd.to(heads.dtype)
