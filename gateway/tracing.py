"""The interface to traces, and the implementation that records nothing.

`gateway.spans` records; it and OpenTelemetry's SDK are imported only if an endpoint is set. A client's
`traceparent` goes on to Triton in either case. Knows nothing of HTTP or gRPC.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.exchange import Exchange

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

Attribute = str | int | float | bool
Headers = Sequence[tuple[str, str]]
"""As gRPC metadata: lower-case names, printable ASCII values."""

_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""https://www.w3.org/TR/trace-context/#traceparent-header, version 00."""

_STATE = re.compile(r"[\x20-\x7e]{1,512}")


class Part:
    """A part of a request: waiting for admission, or a call to a Triton. This class records nothing."""

    def __init__(self, headers: Headers = ()) -> None:
        self.headers = headers
        """The headers with which a called process joins the trace."""

    def event(self, name: str) -> None:
        """Record that something happened now."""

    def fail(self, code: str) -> None:
        """Record how it failed."""


class Trace:
    """One request's trace. This class records nothing.

    Args:
        trace_id: 32 hexadecimal digits; None: there is no trace.
        headers: the client's own trace headers.
    """

    def __init__(self, trace_id: str | None = None, headers: Headers = ()) -> None:
        self.trace_id = trace_id
        self.calls: list[list[str]] = []
        """For each prompt, the addresses of the Tritons that were called for it, in order."""
        self._part = nullcontext(Part(headers))

    def part(
        self, name: str, attributes: Mapping[str, Attribute] | None = None
    ) -> AbstractContextManager[Part]:
        """Return a context for one part of the request; an exception leaving it is recorded as its failure.

        Args:
            name: of the part.
            attributes: of its span; `server.address` marks a call to another process.
        """
        del name, attributes
        return self._part

    def first_token(self) -> None:
        """Record that the first token came now."""

    def end(self, exchange: "Exchange", route: str) -> None:
        """End the trace with everything that is known of the request."""


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)
"""The trace of the request that the current task serves."""


class Tracing(Protocol):
    """Begins traces, and sends them somewhere."""

    def begin(self, method: str, given: Mapping[str, str]) -> Trace:
        """Begin a request's trace now; `given`: the request's headers, by lower-case names."""
        ...

    def close(self) -> None:
        """Send what is left; may take two seconds."""
        ...


class PassOn:
    """Records nothing and passes a client's trace on, for Triton to continue."""

    def begin(self, method: str, given: Mapping[str, str]) -> Trace:
        """See `Tracing.begin`."""
        del method
        if (parent := given.get(TRACEPARENT)) is None or (found := _PARENT.fullmatch(parent)) is None:
            return Trace()
        headers = [(TRACEPARENT, parent)]
        state = given.get(TRACESTATE)
        if state is not None and _STATE.fullmatch(state):
            headers.append((TRACESTATE, state))
        return Trace(found[1], headers)

    def close(self) -> None:
        """See `Tracing.close`."""
