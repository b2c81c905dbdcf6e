"""Which tokens a request's `allowed_token_ids` and `bad_words` leave, as masks for the engine.

As in vLLM, stop ids are no exception: an answer whose allowed ids hold none ends at its limit.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triton_models.engine.sampling import TokenMask
from triton_models.errors import InvalidRequestError, TokenMaskError
from triton_models.text.bad_words import bad_word_ids
from triton_models.text.tokenizers import Tokenizer
from wire.request import Generation

_WORD_BITS = 32
_ALL = 2**_WORD_BITS - 1

Bits = NDArray[np.uint32]
"""Token i is bit i % 32 of word i // 32."""


class TokenLimits:
    """The limits of one request, for any number of choices. Immutable.

    Args:
        allowed: the only ids that may be sampled; None: all.
        banned: sequences of ids, none empty, that must not be sampled.
        vocabulary: number of ids that the model has.

    Raises:
        InvalidRequestError: an allowed id that the model does not have.
    """

    def __init__(
        self, allowed: Collection[int] | None, banned: Iterable[Sequence[int]], vocabulary: int
    ) -> None:
        if allowed is not None and max(allowed) >= vocabulary:
            raise InvalidRequestError(f"allowed_token_ids has an id outside the vocabulary of {vocabulary}")
        self._vocabulary = vocabulary
        self.ends: dict[int, list[Sequence[int]]] = defaultdict(list)
        """The banned sequences of several ids, by the last but one."""
        self.longest = 1
        """Length of the longest banned sequence."""
        alone = []
        for ids in banned:
            self.longest = max(self.longest, len(ids))
            if len(ids) == 1:
                alone.append(ids[0])
            else:
                self.ends[ids[-2]].append(ids)
        every = np.ones(vocabulary, dtype=np.uint8)
        self.allowed = self.packed(every) if allowed is None else self.bits(allowed)
        """Without the ids that are banned whatever precedes them."""
        self.allowed &= ~self.bits(alone)

    @classmethod
    def of(cls, generation: Generation, tokenizer: Tokenizer, vocabulary: int) -> "TokenLimits | None":
        """Return the limits that `generation` asks for; None: it asks for none.

        Raises:
            InvalidRequestError: an allowed id that the model does not have.
            TextError: a word that is not valid Unicode.
        """
        if generation.allowed_token_ids is None and not generation.bad_words:
            return None
        banned = bad_word_ids(tokenizer, generation.bad_words)
        return cls(generation.allowed_token_ids, banned, vocabulary)

    def bits(self, ids: Iterable[int]) -> Bits:
        """Return a row with the bits of `ids`, none of them negative; the model need not have them."""
        given = np.fromiter(ids, dtype=np.int64)
        flags = np.zeros(self._vocabulary, dtype=np.uint8)
        flags[given[given < self._vocabulary]] = 1
        return self.packed(flags)

    @staticmethod
    def packed(flags: NDArray[np.uint8]) -> Bits:
        """Return a row with a bit for each of `flags`, [vocabulary] of 0 or 1."""
        return np.packbits(np.pad(flags, (0, -len(flags) % _WORD_BITS)), bitorder="little").view(np.uint32)

    def mask(self, grammar: TokenMask | None, *, stop_ids: Collection[int], min_tokens: int) -> "LimitedMask":
        """Return the mask of one choice.

        Args:
            grammar: the choice's mask by its grammar, which applies as well.
            stop_ids: the ids that end the choice.
            min_tokens: before so many tokens the engine samples no stop id.
        """
        return LimitedMask(self, grammar, self.bits(stop_ids), min_tokens)


class LimitedMask:
    """The tokens with which one answer may continue, by `limits` and by its grammar, if it has one."""

    def __init__(
        self, limits: TokenLimits, grammar: TokenMask | None, stop_bits: Bits, min_tokens: int
    ) -> None:
        self._limits = limits
        self._grammar = grammar
        self._stop_bits = stop_bits
        self._min_tokens = min_tokens
        self._tokens = 0
        self._last: deque[int] = deque(maxlen=limits.longest)

    def fill(self, words: Tensor) -> None:
        """Write the allowed tokens to `words`.

        Raises:
            TokenMaskError: there are none, or the grammar has a fault.
        """
        row: Bits = words.numpy().view(np.uint32)
        if self._grammar is None:
            row[:] = self._limits.allowed
        else:
            self._grammar.fill(words)
            row &= self._limits.allowed
        for ids in self._limits.ends.get(self._last[-1], ()) if self._last else ():
            if list(self._last)[1 - len(ids) :] == list(ids[:-1]):
                row[ids[-1] // _WORD_BITS] &= _ALL ^ (1 << ids[-1] % _WORD_BITS)
        early = self._tokens < self._min_tokens  # the engine then removes the stop ids
        if not (row & ~self._stop_bits if early else row).any():
            raise TokenMaskError("allowed_token_ids and bad_words leave no token with which it can go on")

    def accept(self, token_id: int) -> None:
        """Continue after `token_id`.

        Raises:
            TokenMaskError: the grammar does not allow the token.
        """
        self._tokens += 1
        self._last.append(token_id)
        if self._grammar is not None:
            self._grammar.accept(token_id)
