"""What a step is for while prompts wait, and for how long decodes may stand back for a burst of them."""

from enum import Enum, auto

_REGAINED_IN = 64
"""Steps with the decodes in them after which one more may leave them out."""

_TOKENS_AN_END = 512
"""A burst brings a prompt to its end for every so many tokens: the first tokens of several are worth a pause,
the middle of long prompts is not."""


class StepPlan(Enum):
    """What the next step is for."""

    MIXED = auto()
    """Every decode, and prompts in what is left of `max_batched_tokens`."""
    LARGE = auto()
    """The same within `burst_tokens`: so many of them wait that each step's own cost is worth sharing."""
    PROMPTS = auto()
    """Prompts alone, within `burst_tokens`."""


def ends_of_a_burst(tokens: int) -> int:
    """Return how many prompts a step of so many tokens must end before decodes stand back for it."""
    return max(2, tokens // _TOKENS_AN_END)


class BurstAllowance:
    """Bounds the steps that leave the decodes out: `most` in a row, and few among many.

    Prompts that came together are computed soonest without the decodes of those among them that are through
    already: clients that begin together then go on together. But whoever is in the middle of an answer waits
    meanwhile. So a stock of `4 * most` steps may be used up, in runs of `most`, and grows again by one for
    every 64 steps that had the decodes in them: under lasting load, one step in 65 stands back.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = 4 * most * _REGAINED_IN
        self._stock = self._full
        """In parts of a step."""
        self._in_a_row = 0

    @property
    def left(self) -> bool:
        """Whether the decodes may stand back in the next step."""
        return self._in_a_row < self._most and self._stock >= _REGAINED_IN

    @property
    def under_way(self) -> bool:
        """Whether they did in the last step."""
        return self._in_a_row > 0

    def stood_back(self) -> None:
        """Count a step that left decodes out."""
        self._in_a_row += 1
        self._stock -= _REGAINED_IN

    def went_on(self) -> None:
        """Count a step that had every decode in it."""
        self._in_a_row = 0
        self._stock = min(self._stock + 1, self._full)
