"""The log line of a finished request.

It holds prompts only if `log_prompts` asks for the body, and never a key, only its owner's name.
"""

from typing import Any, Final

from gateway.exchange import Exchange
from gateway.metrics import UNKNOWN
from gateway.tracing import Trace

BODY_LIMIT_BYTES: Final = 16 * 1024


def request_line(exchange: Exchange, route: str, duration_s: float) -> dict[str, Any]:
    """Return the fields of a finished request's line; times are in milliseconds, with names in `_ms`."""
    line: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "route": route,
        "status": exchange.outcome,
        "duration_ms": _ms(duration_s),
    }
    if exchange.trace.trace_id is not None:
        line["trace_id"] = exchange.trace.trace_id
    if exchange.key_name is not None:
        line["key"] = exchange.key_name
    if exchange.model != UNKNOWN:
        line["model"] = exchange.model
    if exchange.queued_s is not None:
        line |= {"queued_ms": _ms(exchange.queued_s), "waited_ms": _ms(exchange.waited_s)}
    if exchange.generates:
        line |= _generation(exchange)
    if exchange.ignored:
        line["ignored"] = ",".join(exchange.ignored)
    line |= _upstreams(exchange.trace)
    if exchange.error is not None:
        line["error"] = type(exchange.error).__name__
    if exchange.body is not None:
        line["body"] = exchange.body[:BODY_LIMIT_BYTES].decode(errors="replace")
    return line


def _generation(exchange: Exchange) -> dict[str, Any]:
    line: dict[str, Any] = {
        "stream": exchange.stream,
        "prompt_tokens": exchange.prompt_tokens,
        "generated_tokens": exchange.generated_tokens,
    }
    if exchange.first_token_at is not None:
        line["first_token_ms"] = _ms(exchange.first_token_at - exchange.arrived)
    if exchange.finish_reasons:
        # Each reason once, in the order of the choices.
        reasons = dict.fromkeys(reason for _, reason in sorted(exchange.finish_reasons.items()))
        line["finish_reason"] = ",".join(reasons)
    return line


def _upstreams(trace: Trace) -> dict[str, Any]:
    """Return the Tritons that answered or failed last, and the most attempts that any prompt needed."""
    called = [calls for calls in trace.calls if calls]
    if not called:
        return {}
    # Each Triton once, even with several prompts.
    last = dict.fromkeys(calls[-1] for calls in called)
    return {"upstream": ",".join(last), "attempts": max(map(len, called))}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
