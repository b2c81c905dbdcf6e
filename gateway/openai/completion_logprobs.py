"""Log-probabilities in the form that text completions have: lists side by side, an entry for each token.

With `echo` the prompt's tokens come before the answer's, and the first of them, which follows nothing, has
null for its log-probability and for the likely tokens.
"""

from collections.abc import Sequence

from msgspec import Struct

from gateway.generation import PromptLogprob, TokenLogprob


class CompletionLogprobs(Struct, frozen=True):
    """Of a choice's tokens, or of a chunk's: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each place, and the token there whether it is among them or not."""
    text_offset: list[int]
    """Where each token begins in the choice's text, in code points."""


class LogprobsWriter:
    """Writes those of one choice, in one piece or in several, with the `top` most likely tokens of each."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._characters = 0
        """Begun so far."""

    def write(self, tokens: Sequence[TokenLogprob | PromptLogprob]) -> CompletionLogprobs:
        """Write what is reported of the next tokens, those of the prompt first."""
        return CompletionLogprobs(
            [token.token for token in tokens],
            [token.logprob for token in tokens],
            [_likely(token, self._top) for token in tokens],
            [self._place(token.utf8) for token in tokens],
        )

    def _place(self, utf8: bytes) -> int:
        """Return the offset of the character that `utf8` begins or goes on with, and take it in."""
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
    """Tell whether `byte`, perhaps none, is inside of a character in UTF-8 and does not begin it."""
    return b"\x80" <= byte < b"\xc0"
