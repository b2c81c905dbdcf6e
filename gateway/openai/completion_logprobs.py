"""Log-probabilities in the format of text completions: parallel lists with one item per token.

With `echo` the prompt's tokens come before the answer's. The very first token has null for its
log-probability and its alternatives.
"""

from collections.abc import Sequence

from msgspec import Struct

from gateway.generation import PromptLogprob, TokenLogprob


class CompletionLogprobs(Struct, frozen=True):
    """Those of a choice's tokens, or of a chunk's: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each position, always including the actual one."""
    text_offset: list[int]
    """The offset of each token in the choice's text, in code points."""


class LogprobsWriter:
    """Writes those of one choice, at once or in parts, with the `top` most likely tokens at each position."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._characters = 0
        """Number of characters begun so far."""

    def write(self, tokens: Sequence[TokenLogprob | PromptLogprob]) -> CompletionLogprobs:
        """Write the log-probabilities of the next tokens, those of the prompt first."""
        return CompletionLogprobs(
            [token.token for token in tokens],
            [token.logprob for token in tokens],
            [_likely(token, self._top) for token in tokens],
            [self._place(token.utf8) for token in tokens],
        )

    def _place(self, utf8: bytes) -> int:
        """Return the offset of the character that `utf8` begins or continues, and advance by it."""
        goes_on = bool(self._characters) and _continues(utf8[:1])
        place = self._characters - goes_on
        self._characters += sum(not _continues(utf8[at : at + 1]) for at in range(len(utf8)))
        return place


def _likely(token: TokenLogprob | PromptLogprob, top: int) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    likely = {each.token: each.logprob for each in token.top[:top]}
    return likely if token.token in likely else likely | {token.token: token.logprob}


def _continues(byte: bytes) -> bool:
    """Return whether `byte` (or nothing) continues a UTF-8 character instead of beginning one."""
    return b"\x80" <= byte < b"\xc0"
