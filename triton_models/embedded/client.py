"""The part of Triton's protocol that loading and watching need, over one synchronous channel."""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from triton_models.embedded.errors import LoadError
from wire import history, names, strings
from wire.meta import Meta, ProbeReport, decode_meta
from wire.sampling import Generation, Probe, encode_sampling

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # proxies set in the environment are not for 127.0.0.1
    ("grpc.use_local_subchannel_pool", 1),  # do not inherit the back-off of a dead server's channel
    # A refused connection is tried again soon: these are the pauses. The other one is, in spite of its name,
    # how long a connection may take, and on a busy machine that is more than a moment.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),
)


_CONNECTION_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class CallError(LoadError):
    """Triton answered a call with an error, or not in time."""

    def __init__(self, message: str, *, timed_out: bool = False, by_server: bool = False) -> None:
        super().__init__(message, by_server=by_server)
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class EntryState:
    """An entry in the repository's index."""

    state: str
    """READY, LOADING, UNLOADING, UNAVAILABLE, or empty for one that was never loaded."""
    reason: str

    @property
    def gone(self) -> bool:
        """Whether no part of it is in memory."""
        return self.state in {"", "UNAVAILABLE"}

    @property
    def unloaded(self) -> bool:
        """Whether it was unloaded on purpose, or never loaded."""
        return self.gone and self.reason in {"", "unloaded"}


class TritonClient:
    """Calls one server. Usable from several threads."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls in flight fail, in all threads."""
        self._channel.close()

    def live(self, timeout_s: float) -> bool:
        """Ask whether the server is live."""
        try:
            return bool(self._stub.ServerLive(pb.ServerLiveRequest(), timeout=timeout_s).live)
        except grpc.RpcError:
            return False

    def load(self, entry: str) -> "PendingCall":
        """Begin to load `entry`; Triton answers when it is ready, after its warm-up."""
        return PendingCall(
            self._stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name=entry))
        )

    def unload(self, entry: str, timeout_s: float) -> None:
        """Ask Triton to unload `entry`; it answers at once, and only then waits for the entry's streams.

        Raises:
            CallError: Triton refused, or did not answer in time.
        """
        try:
            self._stub.RepositoryModelUnload(
                pb.RepositoryModelUnloadRequest(model_name=entry), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise _call_error(error) from error

    def state(self, entry: str, timeout_s: float) -> EntryState:
        """Look `entry` up in the repository's index.

        Raises:
            CallError: Triton did not answer in time, or is gone.
        """
        try:
            index = self._stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _call_error(error) from error
        for model in index.models:
            if model.name == entry:
                return EntryState(model.state, model.reason)
        return EntryState("", "")

    def probe(self, entry: str, timeout_s: float) -> ProbeReport:
        """Probe the engine of the stream entry `entry`; the probe overtakes all waiting generations.

        Raises:
            CallError: the answer is an error, is late, or holds no report.
        """
        for meta in self._ask(entry, Probe(probe=True), "", names.URGENT_PRIORITY, timeout_s):
            if meta.probe is not None:
                return meta.probe
        raise CallError("the probe's answer holds no report")

    def generate(self, entry: str, timeout_s: float) -> None:
        """Let the stream entry `entry` generate one token.

        Raises:
            CallError: the answer is an error, is late, or ends without a final response.
        """
        wanted = Generation(request_id="health-check", max_tokens=1)
        metas = self._ask(entry, wanted, "你好", names.DEFAULT_PRIORITY, timeout_s)
        if not any(meta.finish_reason is not None for meta in metas):
            raise CallError("a generation of one token ended without its final response")

    def _ask(
        self, entry: str, sampling: Generation | Probe, prompt: str, priority: int, timeout_s: float
    ) -> list[Meta]:
        """Return the `meta` of every response to one request, after the stream has ended on its own.

        The stream is read to its end because of a leak in tritonserver 2.51: a stream that is cancelled while
        its final response is on the way keeps a reference to the model, so the entry can never be unloaded
        again.

        Raises:
            CallError: a response is an error or cannot be read, or the stream does not end in time.
        """
        call = self._stream(entry, sampling, prompt, priority, timeout_s)
        try:
            return [meta for response in call if (meta := _meta(response)) is not None]
        except grpc.RpcError as error:
            raise _call_error(error) from error
        finally:
            call.cancel()

    def _stream(
        self, entry: str, sampling: Generation | Probe, prompt: str, priority: int, timeout_s: float
    ) -> Any:
        values = {
            names.PROMPT: prompt.encode(),
            names.HISTORY: history.encode_history([]),
            names.SAMPLING: encode_sampling(sampling),
        }
        request = pb.ModelInferRequest(model_name=entry)
        for name, value in values.items():
            request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(strings.pack_strings([value]))
        request.parameters["priority"].uint64_param = priority
        # Without the empty final response, the stream of a request without answers would never end.
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s)


class PendingCall:
    """A call whose answer may take minutes."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer; False if it has not come yet.

        Raises:
            CallError: the answer is an error, or the server is gone.
        """
        try:
            self._future.result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            return False
        except grpc.FutureCancelledError as error:
            raise CallError("cancelled") from error
        except grpc.RpcError as error:
            raise _call_error(error) from error
        return True


def _meta(response: Any) -> Meta | None:
    """Return a response's `meta`; None for the empty final response.

    Raises:
        CallError: the response is an error, or its `meta` cannot be read.
    """
    if response.error_message:
        raise CallError(response.error_message)
    for output, raw in zip(
        response.infer_response.outputs, response.infer_response.raw_output_contents, strict=True
    ):
        if output.name == names.META:
            try:
                return decode_meta(strings.unpack_strings(raw)[0])
            except (msgspec.MsgspecError, ValueError, IndexError) as error:
                raise CallError(f"an unreadable meta document: {error}") from error
    return None


def _call_error(error: Any) -> CallError:
    """Wrap a `grpc.RpcError`, which is also the call that it ended."""
    code = error.code()
    return CallError(
        error.details() or str(code),
        timed_out=code is grpc.StatusCode.DEADLINE_EXCEEDED,
        by_server=code not in {grpc.StatusCode.DEADLINE_EXCEEDED, *_CONNECTION_LOST},
    )
