"""Sends the responses to one request: Triton's response sender behind a small interface of ours."""

import logging
from typing import Any, Protocol

import numpy as np

from wire import names
from wire.channel import Frame, encode_frame
from wire.meta import Meta, encode_meta
from wire.refusal import RefusalCode, refusal_text

log = logging.getLogger(__name__)


class Responder(Protocol):
    """Sends one request's responses. Used by one thread at a time, and not after a final response."""

    def send(self, text: str, meta: Meta, *, final: bool) -> None:
        """Send one response."""

    def send_frame(self, frame: Frame) -> None:
        """Send one response of a delta channel, whose request only `refuse` ends."""

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the request with an error. Never raises: there is nobody left to tell."""

    def cancelled(self) -> bool:
        """Return True once the client cancelled or went away."""

    def trace_context(self) -> str | None:
        """Return the W3C trace context of the request, as a JSON object; None: it has none."""


def refusal_response(code: RefusalCode, message: str, pb_utils: Any) -> Any:
    """Return an error response with the status that fits `code`."""
    error = pb_utils.TritonError
    statuses = {
        RefusalCode.INVALID_REQUEST: error.INVALID_ARG,
        RefusalCode.INVALID_GRAMMAR: error.INVALID_ARG,
        RefusalCode.CONTEXT_LENGTH_EXCEEDED: error.INVALID_ARG,
        RefusalCode.QUEUE_FULL: error.UNAVAILABLE,
        RefusalCode.DEADLINE_EXCEEDED: error.UNAVAILABLE,
        RefusalCode.CANCELLED: error.CANCELLED,
        RefusalCode.CHANNEL_LOST: error.UNAVAILABLE,
        RefusalCode.SHUTTING_DOWN: error.UNAVAILABLE,
        RefusalCode.UNAVAILABLE: error.UNAVAILABLE,
        RefusalCode.INTERNAL: error.INTERNAL,
    }
    return pb_utils.InferenceResponse(error=error(refusal_text(code, message), statuses[code]))


class TritonResponder:
    """The responder for a decoupled request of Triton's Python backend."""

    def __init__(self, request: Any, pb_utils: Any) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self._pb_utils = pb_utils

    def send(self, text: str, meta: Meta, *, final: bool) -> None:
        """Send `response` and `meta`, each BYTES [1, 1]."""
        self._send(text.encode(), encode_meta(meta), final=final)

    def send_frame(self, frame: Frame) -> None:
        """Send the frame as `meta`, with an empty `response`."""
        self._send(b"", encode_frame(frame), final=False)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error with the status that fits `code`, as the final response."""
        try:
            self._respond(refusal_response(code, message, self._pb_utils), final=True)
        except Exception:
            # Confined to one request: the caller serves other requests too, and must continue with them.
            log.exception("a refusal could not be sent")

    def cancelled(self) -> bool:
        """Ask Triton, which takes some 50 microseconds."""
        return bool(self._request.is_cancelled())

    def trace_context(self) -> str | None:
        """Return the context of Triton's own span for the request or, if it made none, of the caller's."""
        context: str | None = self._request.trace().get_context()
        # The parameters are a JSON object too, with the headers that were forwarded.
        return context or self._request.parameters()

    def _send(self, text: bytes, document: bytes, *, final: bool) -> None:
        tensors = [self._tensor(names.RESPONSE, text), self._tensor(names.META, document)]
        self._respond(self._pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def _tensor(self, name: str, value: bytes) -> Any:
        return self._pb_utils.Tensor(name, np.array([[value]], dtype=np.object_))

    def _respond(self, response: Any, *, final: bool) -> None:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


class OneResponse:
    """Sends the one response to a request that is not decoupled, after `execute` has returned.

    It does not hold the request, and with it the input's place in the memory shared with Triton.
    """

    def __init__(self, request: Any, pb_utils: Any) -> None:
        self._sender = request.get_response_sender()
        self._pb_utils = pb_utils

    def respond(self, **arrays: Any) -> None:
        """Send these output tensors, numpy arrays by name."""
        tensors = [self._pb_utils.Tensor(name, array) for name, array in arrays.items()]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors))

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error with the status that fits `code`. Never raises."""
        try:
            self._send(refusal_response(code, message, self._pb_utils))
        except Exception:
            # The boundary to Triton: the caller must go on to its other requests.
            log.exception("a refusal could not be sent")

    def cancelled(self) -> bool:
        """Ask Triton, which takes some 50 microseconds; not after the response."""
        return bool(self._sender.is_cancelled())

    def _send(self, response: Any) -> None:
        self._sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
