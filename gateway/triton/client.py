"""A gRPC client of one Triton: streamed inference, and calls about its models.

The raw stub is used because `tritonclient.grpc.aio` drops `triton_enable_empty_final_response` on streams
and answers reserved parameters with a bare CancelledError. This module knows Triton's stream protocol (final
flag, `error_message`, deadlines, cancelling), its repository and metadata, but nothing of tensors, models'
health or our events.
"""

import asyncio
import contextlib
import enum
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.core.backoff import Backoff
from gateway.settings.certificates import TlsFiles
from gateway.settings.files import identity
from gateway.telemetry.tracing import Headers
from gateway.triton.errors import Fault, TritonError, classify

MESSAGE_LIMIT_BYTES = 64 * 2**20

_OPTIONS = [
    # A whole answer with log-probabilities can exceed grpc's default of 4 MiB.
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    # A proxy in the environment is for outgoing traffic, not for nearby Tritons.
    ("grpc.enable_http_proxy", 0),
    # Health probes run every second, so pings are only sent on a connection that went silent, and close it if
    # the peer vanished. Servers allow pings this rare.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Each health probe gets a fresh connection attempt: a returning server is noticed within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_EOF_WAIT_S = 1.0
"""How long a caller waits for a stream's end behind its final response, or an error."""

_LEAVE_S = 30.0
"""How long a stream that is cancelled or over may take to end, also on a busy machine; then it is reset."""

_AGAIN_S = 0.2
"""When a model is first told again to cancel: it may have been told before it had the request."""

_CERTIFICATES_S = 1.0
"""Seconds between two looks at the files of certificates."""

_log = logging.getLogger(__name__)

_RESTRICTED = "triton-grpc-protocol-"
_REPOSITORY = "Repository"
"""The prefix of the methods in Triton's protocol `model-repository`."""

_UNLOADED = "unloaded"
"""The reason that Triton gives for an entry that is unavailable because it was unloaded."""

FINAL = "triton_final_response"
WANT_EMPTY_FINAL = "triton_enable_empty_final_response"

_Request: TypeAlias = service_pb2.ModelInferRequest
Cancel: TypeAlias = Callable[[_Request], _Request]
"""Returns a request that has the model end the one given."""


class EntryState(enum.IntEnum):
    """The state of a repository entry; with several versions, the smallest of their states."""

    LOADING = 0
    READY = 1
    UNLOADING = 2
    """Its running requests are still being answered."""
    FAILED = 3
    """It could not be loaded."""
    UNLOADED = 4
    """It was unloaded on purpose."""
    NEVER_LOADED = 5

    @property
    def in_memory(self) -> bool:
        """Whether any of it is in memory."""
        return self <= EntryState.UNLOADING


@dataclass(frozen=True, slots=True)
class Tls:
    """How to speak TLS to one Triton."""

    files: TlsFiles
    name: str | None = None
    """Whom its certificate must be for; None: the host of its address."""


class Client:
    """A connection to one Triton. Must be made inside the running event loop.

    Every call raises `TritonError`, with any fault.

    Args:
        address: `host:port` of Triton's gRPC endpoint.
        repository_key: the key this Triton requires for listing, loading and unloading models, as KEY=VALUE
            (see its `--grpc-restricted-protocol`); None: no key.
        timeout_s: for each call that is neither an inference nor a load.
        tls: how to speak TLS; None: without.
    """

    def __init__(
        self,
        address: str,
        *,
        repository_key: str | None = None,
        timeout_s: float = 5.0,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        key, _, value = (repository_key or "").partition("=")
        self._repository_headers = ((_RESTRICTED + key, value),) if key else ()
        self._timeout_s = timeout_s
        self._tls = tls
        self._look_at = 0.0
        """When to look for new certificates."""
        self._shown: Sequence[object] = ()
        """Which files the newest channel's certificates came from."""
        self._channels: list[grpc.aio.Channel] = []
        """The last one is for new calls. Those with certificates of before stay for what runs on them."""
        self._closing: set[asyncio.Task[None]] = set()
        self._calls: set[_Call] = set()
        if tls is None:
            self._open(grpc.aio.insecure_channel(address, options=_OPTIONS))
        self._closed: tuple[Fault, str] | None = None

    async def close(self, fault: Fault = Fault.CLOSED, detail: str = "the client was closed") -> None:
        """End every running call, and each that comes later, with `fault`; close the connection."""
        self._closed = fault, detail
        for call in list(self._calls):
            call.end(fault, detail)
        for channel in self._channels:
            await channel.close()
        await asyncio.gather(*self._closing)

    @property
    def _stub(self) -> service_pb2_grpc.GRPCInferenceServiceStub:
        if self._tls is not None:
            self._renew(self._tls)
        return self._newest

    def _open(self, channel: grpc.aio.Channel) -> None:
        self._channels.append(channel)
        self._newest = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._close_replaced()

    def _close_replaced(self) -> None:
        """Close the channels with certificates of before on which nothing runs any more."""
        used = {self._channels[-1], *(call.channel for call in self._calls)}
        for channel in set(self._channels) - used:
            self._channels.remove(channel)
            closing = asyncio.create_task(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _renew(self, tls: Tls) -> None:
        """Open a channel with the certificates that are in the files now, if it has none with those yet."""
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + _CERTIFICATES_S
        found = [identity(path) for path in tls.files.paths()]
        if self._channels and found == self._shown:
            return
        self._shown = found
        try:
            roots, key, cert = tls.files.read()
        except (OSError, ValueError) as error:
            extra = {"upstream": self.address, "detail": str(error)}
            _log.error("certificates for a Triton cannot be used", extra=extra)
            if not self._channels:
                self._look_at = now
                raise TritonError(Fault.UNREACHABLE, "its certificates cannot be used") from None
            return
        name = [] if tls.name is None else [("grpc.ssl_target_name_override", tls.name)]
        credentials = grpc.ssl_channel_credentials(roots, key, cert)
        self._open(grpc.aio.secure_channel(self.address, credentials, options=[*_OPTIONS, *name]))

    def end_inference(self, entry: str, fault: Fault, detail: str) -> None:
        """End every running request to `entry` with `fault`: they would never be answered."""
        for call in list(self._calls):
            if call.entry == entry:
                call.end(fault, detail)

    async def live(self) -> bool:
        """Ask whether the server is up (its models need not be)."""
        return bool((await self._unary("ServerLive", service_pb2.ServerLiveRequest())).live)

    async def server(self) -> service_pb2.ServerMetadataResponse:
        """Return the server's name, such as triton, and its version, such as 2.51.0."""
        request = service_pb2.ServerMetadataRequest()
        metadata: service_pb2.ServerMetadataResponse = await self._unary("ServerMetadata", request)
        return metadata

    async def ready(self, entry: str) -> bool:
        """Ask whether Triton calls `entry` ready; it goes on doing so after the model's process has died."""
        return bool((await self._unary("ModelReady", service_pb2.ModelReadyRequest(name=entry))).ready)

    async def metadata(self, entry: str) -> service_pb2.ModelMetadataResponse:
        """Return the inputs and outputs of `entry`, which must be loaded."""
        request = service_pb2.ModelMetadataRequest(name=entry)
        metadata: service_pb2.ModelMetadataResponse = await self._unary("ModelMetadata", request)
        return metadata

    async def decoupled(self, entry: str) -> bool:
        """Return whether `entry`, which must be loaded, may answer a request with several responses."""
        answer = await self._unary("ModelConfig", service_pb2.ModelConfigRequest(name=entry))
        return bool(answer.config.model_transaction_policy.decoupled)

    async def inferences(self, entry: str) -> int:
        """Return how many requests Triton has counted for `entry`, since it was loaded, whoever sent them."""
        answer = await self._unary("ModelStatistics", service_pb2.ModelStatisticsRequest(name=entry))
        return sum(model.inference_count for model in answer.model_stats)

    async def repository(self) -> dict[str, EntryState]:
        """Return the entries that are on the repository's disk, loaded or not, by name."""
        index = await self._unary("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        states: dict[str, EntryState] = {}
        for version in index.models:
            state = _entry_state(version.state, version.reason)
            states[version.name] = min(state, states.get(version.name, state))
        return states

    async def load(self, entry: str, *, timeout_s: float) -> None:
        """Load `entry` and wait until it is ready, including warm-up; a loaded entry stays as it is."""
        request = service_pb2.RepositoryModelLoadRequest(model_name=entry)
        await self._unary("RepositoryModelLoad", request, timeout_s=timeout_s)

    async def unload(self, entry: str) -> None:
        """Begin to unload `entry`: it takes no new requests, and goes when the last one is answered."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=entry)
        await self._unary("RepositoryModelUnload", request)

    async def _unary(self, method: str, request: Any, *, timeout_s: float | None = None) -> Any:
        self._check_open()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        headers = self._repository_headers if method.startswith(_REPOSITORY) else ()
        running = getattr(self._stub, method)(request, timeout=timeout_s, metadata=headers)
        with self._tracked(running) as call:
            return await call.answer(lambda: call.grpc, deadline=deadline, idle_timeout_s=timeout_s)

    async def stream_infer(
        self,
        request: _Request,
        *,
        deadline: float,
        idle_timeout_s: float,
        headers: Headers = (),
        cancel: Cancel | None = None,
    ) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
        """Send one request on a stream of its own and yield its responses that hold tensors.

        Ends after the response that Triton marks as final. Closing the generator before, or cancelling the
        task that waits in it, cancels the request at once; so does every error. The time that the caller
        spends between two responses does not count towards `idle_timeout_s`.

        Args:
            request: its `id` also travels as the header `x-request-id`, so it is printable ASCII.
            deadline: of the event loop's clock, in seconds; infinity: none.
            idle_timeout_s: longest wait for any one response; infinity: as long as the deadline.
            headers: further headers of the call.
            cancel: how the model is told to cancel the request; None: by a reset of the stream.

        Raises:
            TritonError: with any fault; `SILENT` for the idle timeout, `DEADLINE` for the deadline.
        """
        self._check_open()
        request.parameters[WANT_EMPTY_FINAL].bool_param = True
        # A stream that is to end by itself outlives the deadline.
        left_s = max(0.0, deadline - asyncio.get_running_loop().time()) + (_LEAVE_S if cancel else 0.0)
        stream = self._stub.ModelStreamInfer(
            timeout=None if math.isinf(left_s) else left_s,
            # Never `triton_grpc_error`: with it, tritonserver 2.51 crashes at one refusal in some hundreds.
            # It would turn texts into statuses, but our refusals have their code in the text.
            metadata=(("x-request-id", request.id), *headers),
        )
        with self._tracked(stream, request.model_name) as call:
            call.cancel = None if cancel is None else partial(cancel, request)
            answer = partial(call.answer, deadline=deadline, idle_timeout_s=idle_timeout_s)
            await answer(partial(_send, stream, request))
            while not call.final:
                message = await answer(stream.read)
                if message is grpc.aio.EOF:
                    raise TritonError(Fault.PROTOCOL, "the stream ended before its final response")
                if message.error_message:
                    call.final = True
                    raise classify(message.error_message)
                response = message.infer_response
                call.final = response.parameters[FINAL].bool_param
                if response.outputs:
                    yield response
            # A cancellation that comes now, as of a client that reads no further, does not reach the stream.
            await asyncio.wait({self._end_of(call)}, timeout=_EOF_WAIT_S)

    async def infer(
        self, request: _Request, *, deadline: float, headers: Headers = ()
    ) -> list[service_pb2.ModelInferResponse]:
        """Return all that `stream_infer` yields, where nothing is heard of a request before its answer."""
        responses = self.stream_infer(request, deadline=deadline, idle_timeout_s=math.inf, headers=headers)
        async with contextlib.aclosing(responses):
            return [response async for response in responses]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise TritonError(*self._closed)

    @contextlib.contextmanager
    def _tracked(self, running: grpc.aio.Call, entry: str | None = None) -> Iterator["_Call"]:
        """Let others find and end the call during the block, and end it when the block is left."""
        call = _Call(running, self._channels[-1], entry)
        self._calls.add(call)
        try:
            yield call
        finally:
            if call.final or not (call.cancel is None or running.done()):
                self._end_of(call)
            else:
                self._drop(call)

    def _end_of(self, call: "_Call") -> asyncio.Task[None]:
        """Let a stream end by its status, and not by a reset: its final response has come, or soon will.

        A stream that is reset at the moment of its final response leaves a reference to the model in
        tritonserver 2.51: it could never be unloaded again. Nobody waits for the end, so it may fail.
        """
        if call.ending is None:
            call.ending = asyncio.create_task(self._let_end(call), name="end of a stream")
            self._closing.add(call.ending)
            call.ending.add_done_callback(self._closing.discard)
        return call.ending

    async def _let_end(self, call: "_Call") -> None:
        cancel, call.cancel = call.cancel, None
        try:
            with contextlib.suppress(TritonError):
                if call.final or cancel is None:
                    await call.answer(call.rest, deadline=math.inf, idle_timeout_s=_LEAVE_S)
                else:
                    await self._tell(cancel, call)
        finally:
            self._drop(call)

    async def _tell(self, cancel: Callable[[], _Request], call: "_Call") -> None:
        """Have the model end a request, until its stream has; one that is unloading ends it untold."""
        ended = asyncio.ensure_future(call.answer(call.rest, deadline=math.inf, idle_timeout_s=_LEAVE_S))
        again = Backoff(_AGAIN_S, _LEAVE_S)
        try:
            while not ended.done():
                await self.infer(cancel(), deadline=asyncio.get_running_loop().time() + _LEAVE_S)
                await asyncio.wait({ended}, timeout=again.next())
        except TritonError:
            await asyncio.wait({ended})
        finally:
            call.grpc.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _drop(self, call: "_Call") -> None:
        """End a call that nobody reads any more, unless it has ended."""
        self._calls.discard(call)
        call.grpc.cancel()
        if call.channel is not self._channels[-1]:
            self._close_replaced()


def remaining_s(deadline: float) -> float:
    """Return the seconds left until `deadline`, of the event loop's clock.

    Raises:
        DeadlineError: none are left; the request is not sent.
    """
    left_s = deadline - asyncio.get_running_loop().time()
    if left_s <= 0:
        raise TritonError(Fault.DEADLINE, "the deadline passed before it was sent").to_gateway()
    return left_s


def _entry_state(state: str, reason: str) -> EntryState:
    if state == "UNAVAILABLE":
        return EntryState.UNLOADED if reason in ("", _UNLOADED) else EntryState.FAILED
    return EntryState[state] if state else EntryState.NEVER_LOADED


class _Call:
    """A running call that can be ended from outside with a given error."""

    def __init__(self, running: grpc.aio.Call, channel: grpc.aio.Channel, entry: str | None) -> None:
        self.grpc = running
        self.channel = channel
        self.entry = entry
        """The repository entry of an inference; None for calls about Triton itself."""
        self.final = False
        """Whether the final response of an inference has come, or an error."""
        self.cancel: Callable[[], _Request] | None = None
        """As for `stream_infer`, for this call."""
        self.ending: asyncio.Task[None] | None = None
        """Waits for the stream's end behind that."""
        self._end: tuple[Fault, str] | None = None
        self._limit: asyncio.Timeout | None = None
        """Of the operation that is awaited."""
        self._running: asyncio.Future[Any] | None = None
        """The operation, which goes on when whoever awaits it is cancelled."""

    def end(self, fault: Fault, detail: str) -> None:
        """Let `answer`, now or when it is called next, raise a TritonError of `fault`.

        To cancel the call would not do: one that grpc (1.85) has not begun to send then waits for ever.
        """
        self._end, self.cancel = (fault, detail), None
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def answer(
        self, operation: Callable[[], Awaitable[Any]], *, deadline: float, idle_timeout_s: float
    ) -> Any:
        """Await `operation`, turning every kind of failure into a TritonError."""
        if self._end is not None:
            raise TritonError(*self._end)
        idle_end = asyncio.get_running_loop().time() + idle_timeout_s
        try:
            async with asyncio.timeout_at(min(deadline, idle_end)) as self._limit:
                return await (operation() if self.cancel is None else self._apart(operation))
        except TimeoutError:
            if self._end is not None:
                raise TritonError(*self._end) from None
            if deadline <= idle_end:
                raise TritonError(Fault.DEADLINE, "the request's deadline passed") from None
            raise TritonError(Fault.SILENT, f"no response within {idle_timeout_s} s") from None
        except grpc.aio.AioRpcError as error:
            raise classify(error.details() or "", error.code()) from error
        except asyncio.CancelledError:
            # grpc raises the same error when its channel is closed, which comes after `end`.
            if self._end is not None and not _task_is_cancelled():
                raise TritonError(*self._end) from None
            raise
        finally:
            self._limit = None

    async def _apart(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Await `operation`, which a cancellation does not reach: grpc would reset the stream."""
        self._running = asyncio.ensure_future(operation())
        try:
            return await asyncio.shield(self._running)
        finally:
            if self.cancel is None:  # ended, so nobody reads the rest: one that is never sent would wait on
                self._running.cancel()
            if self._running.done():
                self._running = None

    async def rest(self) -> None:
        """Read a stream to its end."""
        message = None if self._running is None else await self._running
        while message is not grpc.aio.EOF:
            message = await self.grpc.read()


def _task_is_cancelled() -> bool:
    """Tell whether the running task was asked to end.

    A function of its own, because a frame that holds both the task and its CancelledError is part of a cycle,
    which only the garbage collector frees.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _send(call: grpc.aio.StreamStreamCall, request: _Request) -> None:
    await call.write(request)
    # Once the stream is half-closed, Triton ends it, even after errors that would otherwise leave it open.
    await call.done_writing()
