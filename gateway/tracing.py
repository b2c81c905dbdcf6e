"""A request's way through processes: its trace, and the Tritons that it came to. Here nothing is recorded.

`gateway.spans` records. It is imported where an endpoint is set, and nothing of OpenTelemetry's SDK before.
What a client sent as `traceparent` goes on to Triton in either case. Knows nothing of HTTP or gRPC.
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
    """A part of a request's course: waiting for admission, a call of a Triton. This one records nothing."""

    def __init__(self, headers: Headers = ()) -> None:
        self.headers = headers
        """What whoever is called needs, to be a part of the trace."""

    def event(self, name: str) -> None:
        """Note that something happened now."""

    def fail(self, code: str) -> None:
        """Note how it failed."""


class Trace:
    """One request's way; as a trace it is recorded elsewhere, if anywhere.

    Args:
        trace_id: 32 hexadecimal digits; None: there is no trace.
        headers: what the client sent of it.
    """

    def __init__(self, trace_id: str | None = None, headers: Headers = ()) -> None:
        self.trace_id = trace_id
        self.calls: list[list[str]] = []
        """Of each of its prompts the addresses of the Tritons that were called for it, in order."""
        self._part = nullcontext(Part(headers))

    def part(
        self, name: str, attributes: Mapping[str, Attribute] | None = None
    ) -> AbstractContextManager[Part]:
        """Return a context that is a part of the request's course; an exception out of it says how it failed.

        Args:
            name: of the part.
            attributes: what is known of it; with `server.address` it is a call of another process.
        """
        del name, attributes
        return self._part

    def first_token(self) -> None:
        """Note that the first token came now."""

    def end(self, exchange: "Exchange", route: str) -> None:
        """Note that the request is over, and all that is known of it."""


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)
"""Of the request that the current task serves."""


class Tracing(Protocol):
    """Where traces begin and go."""

    def begin(self, method: str, given: Mapping[str, str]) -> Trace:
        """Begin a request's trace now; `given`: the request's headers, by lower-case names."""
        ...

    def close(self) -> None:
        """Send what is left; may wait for two seconds."""
        ...


class PassOn:
    """Records nothing: a trace that a client began is continued by Triton, if at all."""

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
