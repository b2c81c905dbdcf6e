"""Log-probabilities in the format of text completions: parallel lists with one item per token.

With `echo` the prompt's tokens come before the answer's. The very first token has null for its
log-probability and its alternatives.
"""

from collections.abc import Sequence

from msgspec import Struct

from gateway.generation import PromptLogprob, TokenLogprob
from gateway.openai.answer import shown_token


class CompletionLogprobs(Struct, frozen=True):
    """Those of a choice's tokens, or of a chunk's: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each position, always including the actual one."""
    text_offset: list[int]
    """The offset of each token in the choice's text, in code points."""


class LogprobsWriter:
    """Writes those of one choice, at once or in parts, with the `top` most likely tokens at each position.

    With `as_ids`, tokens are named by their ids.
    """

    def __init__(self, top: int, *, as_ids: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._characters = 0
        """Number of characters begun so far."""

    def write(self, tokens: Sequence[TokenLogprob | PromptLogprob]) -> CompletionLogprobs:
        """Write the log-probabilities of the next tokens, those of the prompt first."""
        return CompletionLogprobs(
            [shown_token(token, as_id=self._as_ids) for token in tokens],
            [token.logprob for token in tokens],
            [self._likely(token) for token in tokens],
            [self._place(token.utf8) for token in tokens],
        )

    def _likely(self, token: TokenLogprob | PromptLogprob) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        likely = {shown_token(each, as_id=self._as_ids): each.logprob for each in token.top[: self._top]}
        own = shown_token(token, as_id=self._as_ids)
        return likely if own in likely else likely | {own: token.logprob}

    def _place(self, utf8: bytes) -> int:
        """Return the offset of the character that `utf8` begins or continues, and advance by it."""
        goes_on = bool(self._characters) and _continues(utf8[:1])
        place = self._characters - goes_on
        self._characters += sum(not _continues(utf8[at : at + 1]) for at in range(len(utf8)))
        return place


def _continues(byte: bytes) -> bool:
    """Return whether `byte` (or nothing) continues a UTF-8 character instead of beginning one."""
    return b"\x80" <= byte < b"\xc0"
