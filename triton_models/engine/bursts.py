"""For how long decodes may stand back while a burst of prompts is computed."""


class BurstAllowance:
    """Bounds the steps that leave the decodes out: `most` in a row, and few among many.

    Prompts that came together are computed soonest without the decodes of those among them that are through
    already: each such decode is a whole reading of the weights for few tokens. But whoever is in the middle
    of an answer waits meanwhile. So a stock of `4 * most` steps may be used up, in runs of `most`, and grows
    again by one for every `most` steps that had the decodes in them: under lasting load, one step in
    `most + 1` stands back at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = 4 * most * most
        self._stock = self._full
        """In parts of a step, `most` to each."""
        self._in_a_row = 0

    @property
    def left(self) -> bool:
        """Whether the decodes may stand back in the next step."""
        return self._in_a_row < self._most <= self._stock

    @property
    def under_way(self) -> bool:
        """Whether they did in the last step."""
        return self._in_a_row > 0

    def stood_back(self) -> None:
        """Count a step that left decodes out."""
        self._in_a_row += 1
        self._stock -= self._most

    def went_on(self) -> None:
        """Count a step that had every decode in it."""
        self._in_a_row = 0
        self._stock = min(self._stock + 1, self._full)
