"""The record of one HTTP request, from which its metrics and its log line are made.

`deadline` is on the event loop's clock; `arrived` and all other times are `time.perf_counter` values. All are
in seconds.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter

from starlette.types import Send

from gateway.errors import ClientGoneError, GatewayError
from gateway.generation import Accepted, Delta, Event
from gateway.metrics import UNKNOWN, Metrics, TokenMetrics
from gateway.tracing import Trace


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its answer. The layers fill it in as they go; it is read when the request is over.

    The request's outermost frame releases `resources`, however the request ends: answered, failed, cancelled,
    or never begun.
    """

    request_id: str
    method: str
    arrived: float
    deadline: float
    metrics: Metrics
    resources: AsyncExitStack
    trace: Trace = field(default_factory=Trace)
    send_body: Send | None = None
    """The server's own ASGI channel, for pieces of a body whose head went through all middleware."""
    model: str = UNKNOWN
    """The served model asked for, or `unknown`."""
    key_name: str | None = None
    generates: bool = False
    """True once it has asked for admission to the engines; metrics of generations then count it."""
    stream: bool = False
    status: int | None = None
    """As sent; None until then."""
    error: GatewayError | None = None
    """The first thing that went wrong, before or after the first byte."""
    waited_s: float = 0.0
    """Time spent waiting for the client's body, for admission and for the upstream."""
    queued_s: float | None = None
    """The part of `waited_s` spent waiting for admission; None: it needed none, or did not get that far."""
    ignored: dict[str, None] = field(default_factory=dict)
    """Names of fields of its body that were ignored, in their order."""
    body: bytes | None = None
    """As the client sent it; kept only if it is to be logged."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)
    """By choice."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """By choice."""
    _counting: TokenMetrics | None = field(default=None, init=False)
    """Looked up with the first token, once: labels cost more than what they count."""

    @property
    def outcome(self) -> int:
        """The effective status: the error's, if there was one, even if 200 had already been sent."""
        if self.error is not None:
            return self.error.status
        return self.status if self.status is not None else ClientGoneError.status

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers together."""
        return self.prompt_tokens + self.generated_tokens

    def fail(self, error: GatewayError) -> None:
        """Record an error, unless there is one already."""
        if self.error is None:
            self.error = error

    def forget_error(self) -> None:
        """Drop the error once it was reported, since its traceback refers to frames that hold this exchange.

        Otherwise only the next full garbage collection would free that cycle, and the request's body with it.
        """
        self.error = None

    def observe(self, event: Event) -> None:
        """Count an event's tokens and the time between them."""
        if type(event) is Delta:
            if event.tokens:
                self._count(event.index, event.tokens)
            if event.finish_reason is not None:
                self.finish_reasons[event.index] = event.finish_reason
        elif type(event) is Accepted:
            self.prompt_tokens = event.prompt_tokens
            self.metrics.prompt_tokens.labels(self.model).inc(event.prompt_tokens)

    def _count(self, choice: int, tokens: int) -> None:
        now = perf_counter()
        self.generated_tokens += tokens
        counting = self._counting
        if counting is None:
            counting = self._counting = self.metrics.tokens_of(self.model)
            self.first_token_at = now
            counting.time_to_first.observe(now - self.arrived)
            self.trace.first_token()
        counting.generated.inc(tokens)
        before = self.last_token_at.get(choice)
        if before is not None:
            counting.inter_token.observe((now - before) / tokens, tokens)
        elif tokens > 1:
            counting.inter_token.observe(0.0, tokens - 1)
        self.last_token_at[choice] = now
