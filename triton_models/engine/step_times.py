"""How long steps with prompts take, by their rows, and so how many rows are worth it.

A library's products take longer by whole tiles, of which a GPU computes as many at once as it has
multiprocessors. So some numbers of rows take less time for each row than a few more do: on an H200, 928 rows
of ChatGLM3-6B's shape take 15.9 ms, and 960 take 17.9 (bench/LOG.md). Prompts can be cut anywhere.
"""

from bisect import bisect_left
from dataclasses import dataclass

_DECODE_S = 0.00001
"""What a decode takes in a step beside its row, for attention and sampling (bench/LOG.md)."""
_GAIN = 1.02
"""How much faster a row must be, or the times may just have been measured so."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one engine's steps; without any, every step is as large as it can be."""

    sizes: tuple[int, ...] = ()
    """Numbers of rows, ascending; a step of any other takes as long as the next one."""
    seconds: tuple[float, ...] = ()
    """What a step of each takes."""

    def best(self, decodes: int, most: int, *, rest: bool) -> int:
        """Return how many rows a step should have: all it could have, or fewer that take less time for each.

        At least half of what could be computed of prompts is.

        Args:
            decodes: rows of sequences that decode; these are in the step anyhow.
            most: rows with as much of the prompts as fits.
            rest: whether some of the prompts is left for later steps even so. If it is not, somebody's first
                token is a step later for it, which must spare those who decode more than that.
        """
        place = bisect_left(self.sizes, most)
        if place == len(self.sizes):
            return most
        least = decodes + (most - decodes + 1) // 2
        first = bisect_left(self.sizes, least, hi=place)
        others_s = _DECODE_S * decodes
        whole_s = self.seconds[place]
        fastest, rows, seconds = _GAIN * most / (whole_s + others_s), most, whole_s
        for size, size_s in zip(self.sizes[first:place], self.seconds[first:place], strict=True):
            if (pace := size / (size_s + others_s)) > fastest:
                fastest, rows, seconds = pace, size, size_s
        if rest or decodes * (whole_s - seconds) > seconds:
            return rows
        return most
