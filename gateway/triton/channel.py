"""One Triton's gRPC channel, kept for as long as that is there, with ModelStreamInfer done by hand.

The raw stub is used because `tritonclient.grpc.aio` drops `triton_enable_empty_final_response` on streams
and answers reserved parameters with a bare CancelledError. This module knows Triton's stream protocol (final
flag, `error_message`, deadlines, cancelling) and nothing of tensors, models' health or our events.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.tracing import Headers
from gateway.triton.status import Fault, TritonError, classify

MESSAGE_LIMIT_BYTES = 64 * 2**20

_OPTIONS = [
    # A whole answer with log-probabilities passes grpc's default of 4 MiB.
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    # A proxy in the environment is meant for the way out, not for the Tritons next door.
    ("grpc.enable_http_proxy", 0),
    # Health probes run every second, so pings are only sent on a connection that went silent: this is what
    # closes one whose peer vanished without a word. Servers allow that few.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Each health probe finds a fresh connection attempt: a server that is back is seen within a second or so.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_EOF_WAIT_S = 1.0

_RESTRICTED = "triton-grpc-protocol-"
_REPOSITORY = "Repository"
"""How the methods begin that are Triton's protocol `model-repository`."""

FINAL = "triton_final_response"
WANT_EMPTY_FINAL = "triton_enable_empty_final_response"


class Channel:
    """A connection to one Triton. Must be made inside the running event loop.

    Args:
        address: `host:port` of Triton's gRPC endpoint.
        repository_key: what this Triton asks of who lists, loads or unloads its models, KEY=VALUE as in its
            `--grpc-restricted-protocol`; None: nothing.
    """

    def __init__(self, address: str, *, repository_key: str | None = None) -> None:
        self.address = address
        key, _, value = (repository_key or "").partition("=")
        self._repository_headers = ((_RESTRICTED + key, value),) if key else ()
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._calls: set[_Call] = set()

    async def close(self, fault: Fault = Fault.CLOSED, detail: str = "the channel was closed") -> None:
        """End every running call with `fault` and close the connection."""
        for call in list(self._calls):
            call.end(fault, detail)
        await self._channel.close()

    def end_inference(self, entry: str, fault: Fault, detail: str) -> None:
        """End every running request to `entry` with `fault`: nothing will answer them."""
        for call in list(self._calls):
            if call.entry == entry:
                call.end(fault, detail)

    async def unary(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Call the unary `method` of GRPCInferenceService.

        Raises:
            TritonError: with any fault.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        headers = self._repository_headers if method.startswith(_REPOSITORY) else ()
        running = getattr(self._stub, method)(request, timeout=timeout_s, metadata=headers)
        with self._tracked(running) as call:
            return await call.answer(lambda: call.grpc, deadline=deadline, idle_timeout_s=timeout_s)

    async def infer(
        self, request: service_pb2.ModelInferRequest, *, deadline: float, headers: Headers = ()
    ) -> service_pb2.ModelInferResponse:
        """Send one request to an entry that is not decoupled and return its one response.

        Cancelling the task that waits cancels the call at once.

        Args:
            request: its `id` also travels as the header `x-request-id`, so it is printable ASCII.
            deadline: of the event loop's clock, in seconds.
            headers: further ones of the call.

        Raises:
            TritonError: with any fault but `SILENT`.
        """
        running = self._stub.ModelInfer(
            request,
            timeout=max(0.0, deadline - asyncio.get_running_loop().time()),
            metadata=(("x-request-id", request.id), *headers),
        )
        with self._tracked(running, request.model_name) as call:
            return await call.answer(lambda: call.grpc, deadline=deadline, idle_timeout_s=math.inf)

    async def stream_infer(
        self,
        request: service_pb2.ModelInferRequest,
        *,
        deadline: float,
        idle_timeout_s: float,
        headers: Headers = (),
    ) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
        """Send one request on a stream of its own and yield its responses that hold tensors.

        Ends after the response that Triton marks as final. Closing the generator, or cancelling the task that
        waits in it, cancels the call at once; so does every error. Time that the caller spends between two
        responses does not count as the upstream's silence.

        Args:
            request: its `id` also travels as the header `x-request-id`, so it is printable ASCII.
            deadline: of the event loop's clock, in seconds; infinity: none.
            idle_timeout_s: longest wait for any one response; infinity: as long as the deadline.
            headers: further ones of the call.

        Raises:
            TritonError: with any fault; `SILENT` for the idle timeout, `DEADLINE` for the deadline.
        """
        request.parameters[WANT_EMPTY_FINAL].bool_param = True
        stream = self._stub.ModelStreamInfer(
            timeout=None if math.isinf(deadline) else max(0.0, deadline - asyncio.get_running_loop().time()),
            # Never `triton_grpc_error`: asked for statuses in place of texts, tritonserver 2.51 dies of one
            # refusal in some hundreds. A refusal of ours has its code in the text.
            metadata=(("x-request-id", request.id), *headers),
        )
        with self._tracked(stream, request.model_name) as call:
            await call.answer(
                lambda: _send(stream, request), deadline=deadline, idle_timeout_s=idle_timeout_s
            )
            final = False
            while not final:
                message = await call.answer(stream.read, deadline=deadline, idle_timeout_s=idle_timeout_s)
                if message is grpc.aio.EOF:
                    raise TritonError(Fault.PROTOCOL, "the stream ended before its final response")
                if message.error_message:
                    raise classify(message.error_message)
                response = message.infer_response
                final = response.parameters[FINAL].bool_param
                if response.outputs:
                    yield response
            # The stream ends by its status, not by a reset: one reset per request looks to proxies in between
            # like the HTTP/2 "rapid reset" attack. The answer is whole, so that a failure now is no news.
            with contextlib.suppress(TritonError):
                await call.answer(stream.read, deadline=deadline, idle_timeout_s=_EOF_WAIT_S)

    @contextlib.contextmanager
    def _tracked(self, running: grpc.aio.Call, entry: str | None = None) -> Iterator["_Call"]:
        """Let others find and end the call, and leave no way out of the block with it still running."""
        call = _Call(running, entry)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            running.cancel()


class _Call:
    """A running call that can be ended from outside with an error of our choice."""

    def __init__(self, running: grpc.aio.Call, entry: str | None) -> None:
        self.grpc = running
        self.entry = entry
        """The repository entry that an inference goes to; None for questions to Triton itself."""
        self._end: tuple[Fault, str] | None = None

    def end(self, fault: Fault, detail: str) -> None:
        """Cancel the call; whoever waits in `answer` gets a TritonError of `fault`."""
        self._end = fault, detail
        self.grpc.cancel()

    async def answer(
        self, operation: Callable[[], Awaitable[Any]], *, deadline: float, idle_timeout_s: float
    ) -> Any:
        """Await `operation`, with every way in which it can fail turned into a TritonError."""
        idle_end = asyncio.get_running_loop().time() + idle_timeout_s
        try:
            async with asyncio.timeout_at(min(deadline, idle_end)):
                return await operation()
        except TimeoutError:
            if deadline <= idle_end:
                raise TritonError(Fault.DEADLINE, "the request's deadline passed") from None
            raise TritonError(Fault.SILENT, f"no response within {idle_timeout_s} s") from None
        except grpc.aio.AioRpcError as error:
            raise classify(error.details() or "", error.code()) from error
        except asyncio.CancelledError:
            # grpc raises the same for a call that `end` cancelled and for a task that was cancelled in it.
            task = asyncio.current_task()
            if self._end is not None and task is not None and not task.cancelling():
                raise TritonError(*self._end) from None
            raise


async def _send(call: grpc.aio.StreamStreamCall, request: service_pb2.ModelInferRequest) -> None:
    await call.write(request)
    # Half-closed, the stream is ended by Triton itself, also after those errors that would leave it open.
    await call.done_writing()
