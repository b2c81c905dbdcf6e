"""A request's sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from triton_models.errors import InvalidRequestError, TokenMaskError

TOP_K_LIMIT = 2**31 - 1

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would only turn rounding noise into a choice."""


class TokenMask(Protocol):
    """Decides which tokens may come next, as a grammar does.

    The engine calls `fill` once before it samples a token, and `accept` once, in order, for each sampled
    token after which the answer continues: not for the last one, and not again after a preemption. An
    exception from either ends only that request; the message of a `TokenMaskError` goes to its client.

    The others look ahead of what the mask was told, which stays where it is: only so there are guesses. An
    exception from any of these ends the guesses, not the request.
    """

    def fill(self, words: Tensor) -> None:
        """Write the allowed tokens: token i is bit i % 32 of `words[i // 32]`, an int32 CPU row of zeros."""
        ...

    def accept(self, token_id: int) -> None:
        """Continue after `token_id`, which was sampled."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the next tokens, as a tokenizer splits the text that must come; empty if many texts may.

        The last token of that text is left out where it may be one with what follows.
        """
        ...

    def takes(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may come next, one after the other."""
        ...

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Do what `fill` does for each of `rows`, each after one more of `tokens`, which it takes.

        Rows that it cannot fill are left as they are: then the guesses before count as wrong there.
        """
        ...


@runtime_checkable
class BatchedMask(TokenMask, Protocol):
    """A token mask of a kind of which many are filled, or told a token, in one call.

    Python's lock is released once then, not for each mask: other threads take it whenever it is free, and
    give it back late.
    """

    @classmethod
    def fill_all(
        cls, masks: Sequence[Any], words: Tensor, rows: Sequence[int]
    ) -> Sequence[TokenMaskError | None]:
        """Do what `fill` does for each of `masks`, all of this kind, and its row of `words`, [M, W] int32.

        Returns the error of each. Any exception means that it is unknown which mask failed: `fill` is then
        called for each.
        """
        ...

    @classmethod
    def accept_all(cls, masks: Sequence[Any], token_ids: Sequence[int]) -> Sequence[TokenMaskError | None]:
        """Do what `accept` does for each of `masks`, all of this kind and none twice; return the errors.

        After any exception, none of them is used any more.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; never affects other requests.

    Values are within the ranges of a request's (`wire.sampling`), which was checked when it came.

    Raises:
        InvalidRequestError: a top_k over `TOP_K_LIMIT`, or `min_tokens` over `max_tokens`.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    """Minimum probability of a token, as a share of the most likely one's; 0 keeps every token."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or answer, and multiplies negative ones; 1: no penalty."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer, once per occurrence."""
    seed: int | None = None
    """64 bits; None: a random one. The same seed and logits give the same tokens in any batch."""
    max_tokens: int | None = None
    """Most new tokens; None: what the prompt leaves of the context."""
    min_tokens: int = 0
    """Stop ids cannot be sampled before this many tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many most likely ones; None: none at all."""
    mask: TokenMask | None = None

    greedy: bool = field(init=False, repr=False, compare=False)
    """True if the most likely token is taken."""
    truncated: bool = field(init=False, repr=False, compare=False)
    """True if min_p, top_k or top_p remove tokens."""
    penalised: bool = field(init=False, repr=False, compare=False)
    """True if earlier tokens change logits."""
    plain: bool = field(init=False, repr=False, compare=False)
    """True if nothing but a temperature, a seed, a truncation and a mask is set."""

    def __post_init__(self) -> None:
        """Check what a request may ask for in vain, and derive the rest."""
        if self.top_k > TOP_K_LIMIT:
            raise InvalidRequestError(f"top_k must be 0 to {TOP_K_LIMIT}, not {self.top_k}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        # Computed once, since every step reads these for every sequence.
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        object.__setattr__(self, "greedy", self.temperature < GREEDY_BELOW)
        object.__setattr__(self, "truncated", self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        object.__setattr__(self, "penalised", any(penalties))
        asks_more = self.penalised or self.logit_bias or self.min_tokens
        object.__setattr__(self, "plain", not asks_more and self.logprobs is None)
