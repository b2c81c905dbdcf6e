"""The kinds of steps, and how long decodes may pause for a burst of prompts."""

from enum import Enum, auto

_REGAINED_IN = 32
"""Number of steps with decodes that earn one more step without them."""

_TOKENS_AN_END = 512
"""A step that pauses the decodes must finish at least one prompt per this many tokens: the first tokens of
several requests are worth a pause, the middle of long prompts is not."""


class StepPlan(Enum):
    """The kind of the next step."""

    MIXED = auto()
    """Every decode, and prompts in what the decodes leave of `max_batched_tokens`."""
    LARGE = auto()
    """The same with `burst_tokens`: many prompts wait, and a larger step spreads its fixed cost."""
    PROMPTS = auto()
    """Prompts only, within `burst_tokens`."""


def ends_of_a_burst(tokens: int) -> int:
    """Return how many prompts a step of this many tokens must finish to make decodes pause."""
    return max(2, tokens // _TOKENS_AN_END)


class BurstAllowance:
    """Limits the steps that leave the decodes out: `most` in a row, and few in the long run.

    Prompts that arrive together are computed soonest if those of them that are already decoding pause;
    clients that start together then also continue together. But all other answers in progress wait
    meanwhile. So there is a stock of `4 * most` such steps, used in runs of at most `most`. It regains one
    for every 32 steps with decodes: under sustained load, one step in 33 leaves the decodes out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = 4 * most * _REGAINED_IN
        self._stock = self._full
        """In fractions of a step."""
        self._in_a_row = 0

    @property
    def left(self) -> bool:
        """Whether the decodes may pause in the next step."""
        return self._in_a_row < self._most and self._stock >= _REGAINED_IN

    @property
    def under_way(self) -> bool:
        """Whether the decodes paused in the last step."""
        return self._in_a_row > 0

    def stood_back(self) -> None:
        """Count a step that left the decodes out."""
        self._in_a_row += 1
        self._stock -= _REGAINED_IN

    def went_on(self) -> None:
        """Count a step with every decode in it."""
        self._in_a_row = 0
        self._stock = min(self._stock + 1, self._full)
