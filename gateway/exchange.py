"""What is known of one HTTP request while it lasts: the record behind its metrics and its log line.

`arrived` and the other instants are of `time.perf_counter`, in seconds; `deadline` is of the event loop's
clock.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter

from gateway.errors import ClientGoneError, GatewayError
from gateway.generation import Accepted, Delta, Event
from gateway.metrics import UNKNOWN, Metrics
from gateway.tracing import Trace


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its answer. Written by the layers as they learn things, read when it is over.

    `resources` are released by the outermost frame of the request, however it ends: answered, failed,
    cancelled, or never begun.
    """

    request_id: str
    method: str
    arrived: float
    deadline: float
    metrics: Metrics
    resources: AsyncExitStack
    trace: Trace = field(default_factory=Trace)
    model: str = UNKNOWN
    """A served model, else `unknown`."""
    key_name: str | None = None
    generates: bool = False
    """True once it asks for a place at the engines: the request counts in the metrics of generations."""
    stream: bool = False
    status: int | None = None
    """As sent; None while nothing was."""
    error: GatewayError | None = None
    """The first thing that went wrong, before or after the first byte."""
    waited_s: float = 0.0
    """Spent waiting for the client's body, for admission and for the upstream."""
    queued_s: float | None = None
    """Of those, waiting for admission; None: it needed none, or never came so far."""
    body: bytes | None = None
    """As the client sent it; only where it is to be logged."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)
    """By choice."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """By choice."""

    @property
    def outcome(self) -> int:
        """The status that the request deserved: an error's own, even where 200 had been sent already."""
        if self.error is not None:
            return self.error.status
        return self.status if self.status is not None else ClientGoneError.status

    def fail(self, error: GatewayError) -> None:
        """Note what went wrong; the first one counts."""
        if self.error is None:
            self.error = error

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
        metrics, model = self.metrics, self.model
        metrics.generated_tokens.labels(model).inc(tokens)
        if self.first_token_at is None:
            self.first_token_at = now
            metrics.time_to_first_token.labels(model).observe(now - self.arrived)
            self.trace.first_token()
        before = self.last_token_at.get(choice)
        if before is not None:
            metrics.inter_token_latency.observe(model, (now - before) / tokens, tokens)
        elif tokens > 1:
            metrics.inter_token_latency.observe(model, 0.0, tokens - 1)
        self.last_token_at[choice] = now
