"""Log-probabilities in the form of the wire contract."""

from collections.abc import Sequence

from triton_models.engine.sequence import TokenLogprobs
from triton_models.text.tokenizers import Tokenizer, shown_tokens
from wire import meta as wire
from wire.sampling import Generation

LOGPROB_FLOOR = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold."""

RESPONSE_TOKENS = 256
"""Most tokens of a prompt reported in one response, however many a step computed: with their alternatives, at
most half a megabyte, which takes a few milliseconds to read."""


def wire_logprob(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> wire.TokenLogprob:
    """Return the report on one token of the answer."""
    token, utf8 = tokenizer.display(logprobs.id)
    return wire.TokenLogprob(
        id=logprobs.id,
        token=token,
        bytes=list(utf8),
        logprob=max(logprobs.logprob, LOGPROB_FLOOR),
        top=_top(tokenizer, logprobs),
    )


def _top(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> list[wire.TopLogprob]:
    found = []
    for token_id, logprob in logprobs.top:
        token, utf8 = tokenizer.display(token_id)
        found.append(
            wire.TopLogprob(id=token_id, token=token, bytes=list(utf8), logprob=max(logprob, LOGPROB_FLOOR))
        )
    return found


class PromptReport:
    """The report on a prompt's tokens, filled as the engine computes them. The first has no probability."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], *, special: bool, ranks: bool) -> None:
        """Begin the report on `ids`, at least one. `special`: see `shown_tokens`; `ranks`: report them."""
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._shown = shown_tokens(tokenizer, ids, special=special)
        token, utf8 = next(self._shown)
        self._next = [wire.PromptLogprob(id=ids[0], token=token, bytes=list(utf8), logprob=None, top=[])]

    @classmethod
    def asked(cls, generation: Generation, tokenizer: Tokenizer, ids: Sequence[int]) -> "PromptReport | None":
        """Return the report that `generation` asks for, matching the prompt's echo; None if it wants none."""
        if generation.prompt_logprobs is None:
            return None
        # Text is echoed as given, without the special tokens put before it.
        special = generation.show_special and generation.prompt_token_ids is not None
        return cls(tokenizer, ids, special=special, ranks=generation.prompt_ranks)

    @property
    def waits(self) -> bool:
        """Whether anything has not been reported yet."""
        return bool(self._next)

    @property
    def overflows(self) -> bool:
        """Whether more has not been reported yet than one response may hold."""
        return len(self._next) > RESPONSE_TOKENS

    def take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the engine's results for the next tokens."""
        for each in logprobs:
            token, utf8 = next(self._shown)
            self._next.append(
                wire.PromptLogprob(
                    id=each.id,
                    token=token,
                    bytes=list(utf8),
                    logprob=max(each.logprob, LOGPROB_FLOOR),
                    top=_top(self._tokenizer, each),
                    rank=each.rank if self._ranks else None,
                )
            )

    def tell(self) -> list[wire.PromptLogprob] | None:
        """Return what was not reported yet, as much as one response may hold; None if there is nothing."""
        told, self._next = self._next[:RESPONSE_TOKENS], self._next[RESPONSE_TOKENS:]
        return told or None
