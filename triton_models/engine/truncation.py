"""Truncation by min_p, top_k and top_p: thresholds on logits, found without sorting ids.

The tokens kept are the first ones of a row by descending logit, equal ones by id. So the sorted values alone
show how many are kept, and the last of those is the threshold for the unsorted row.
"""

import torch
from torch import Tensor


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Remove the tokens that min_p, then top_k, then top_p do not keep, without waiting for the device.

    min_p keeps tokens at least min_p times as likely as the most likely one (Nguyen et al., "Turning up the
    heat", 2024). Of these, top_k keeps the k most likely. Of those, top_p keeps the fewest that make up that
    share of their sum (Holtzman et al., "The curious case of neural text degeneration", 2020). A row's result
    depends on that row alone: sums are float64, and their order is independent of other rows.

    Args:
        scaled: [R, vocab] float32, the largest of each row 0; changed in place.
        top_k: [R] int64; 0 keeps every token.
        top_p: [R] float64, over 0; 1 keeps every token.
        min_p: [R] float64, 0 to 1; 0 keeps every token.

    Returns:
        `scaled`, with -inf for removed tokens. A row with NaN is meaningless before and after.
    """
    scaled.masked_fill_(_below_min_p(scaled, min_p), -torch.inf)
    ordered = scaled.sort(dim=-1, descending=True).values
    threshold, equals = _threshold(ordered, _kept(ordered, _mass(scaled), top_k, top_p))
    equal = scaled == threshold
    surplus = equal & (equal.cumsum(dim=-1) > equals)
    return scaled.masked_fill_((scaled < threshold) | surplus, -torch.inf)


def _below_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    # The largest is 0, so exponentials are probabilities relative to the largest one.
    return scaled < min_p.log().to(scaled.dtype)[:, None]


def _mass(scaled: Tensor) -> Tensor:
    """Return the sum of the exponentials of each row: [R, 1] float64.

    A cumulative sum adds each row in the same order, while `sum` may divide a lone row among threads.
    """
    return scaled.exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]


def _kept(ordered: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return how many tokens of each row are kept, [R] int64.

    Args:
        ordered: [R, L] values in descending order: the first L of each row, or all.
        mass: [R, 1] float64, from `_mass` of the whole rows.
        top_k: [R] int64.
        top_p: [R] float64.
    """
    length = ordered.shape[1]
    cumulative = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
    limit = torch.where(top_k > 0, top_k, length).clamp(max=length)[:, None]
    whole = torch.where(top_k[:, None] > 0, cumulative.gather(1, limit - 1), mass)
    # With a top_p of 1 there is no target, lest rounding remove tokens.
    target = torch.where(top_p < 1, top_p, torch.inf)[:, None] * whole
    # One more than the number of values whose sum falls short of the target.
    return torch.minimum(torch.searchsorted(cumulative, target) + 1, limit).squeeze(1)


def _threshold(ordered: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last value kept, [R, 1], and how many values equal to it are kept, [R, 1] int64."""
    threshold = ordered.gather(1, (kept - 1).clamp(min=0)[:, None])
    return threshold, kept[:, None] - (ordered > threshold).sum(dim=-1, keepdim=True)
