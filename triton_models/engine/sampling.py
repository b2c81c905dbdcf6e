"""What a request asks of the sampler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from triton_models.errors import InvalidRequestError

TOP_LOGPROBS_LIMIT = 20

LARGEST = 1e6
"""Of temperatures and biases: far beyond any use, and far from where float32 ends."""

TOP_K_LIMIT = 2**31 - 1

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would only turn rounding noise into a choice."""


class TokenMask(Protocol):
    """A grammar's say over the next token.

    The engine asks once per token that it samples and tells each token behind which it goes on once, in
    order: not the last, and not again after a preemption. Either call may raise `TokenMaskError`, which
    ends that request alone.
    """

    def fill(self, words: Tensor) -> None:
        """Write the allowed tokens: token i is bit i % 32 of `words[i // 32]`, an int32 CPU row of zeros."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on behind `token_id`, which was sampled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; nothing here ever touches another request.

    Raises:
        InvalidRequestError: a value out of range, or a contradiction.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    seed: int | None = None
    """64 bits; None: drawn for the request. The same seed and logits give the same tokens in any batch."""
    max_tokens: int | None = None
    """New tokens; None: what is left of the context."""
    min_tokens: int = 0
    """Stop ids cannot be sampled before this many tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many most likely ones; None: none at all."""
    mask: TokenMask | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0 <= self.temperature <= LARGEST:
            raise InvalidRequestError(f"temperature must be 0 to {LARGEST:g}, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p must be over 0 and at most 1, not {self.top_p}")
        if not 0 <= self.top_k <= TOP_K_LIMIT:
            raise InvalidRequestError(f"top_k must be 0 to {TOP_K_LIMIT}, not {self.top_k}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequestError(f"seed must fit 64 bits, not {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.min_tokens < 0:
            raise InvalidRequestError(f"min_tokens must be at least 0, not {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= TOP_LOGPROBS_LIMIT:
            raise InvalidRequestError(f"logprobs must be 0 to {TOP_LOGPROBS_LIMIT}, not {self.logprobs}")
        if not all(abs(value) <= LARGEST for value in self.logit_bias.values()):
            raise InvalidRequestError(f"logit_bias values must be within {LARGEST:g} of 0")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """True if top_k or top_p take tokens away."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def plain(self) -> bool:
        """True if a temperature and a seed are all there is to it."""
        return not (
            self.truncated
            or self.logit_bias
            or self.min_tokens
            or self.mask is not None
            or self.logprobs is not None
        )
