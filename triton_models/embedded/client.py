"""The part of Triton's protocol that loading and watching need, over one channel."""

from typing import Any

import grpc
import grpc.aio
import msgspec
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from triton_models.embedded.errors import ModelError
from wire import names, strings
from wire.meta import ProbeReport, decode_meta
from wire.request import Probe, encode_request

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # proxies set in the environment are not for 127.0.0.1
    ("grpc.use_local_subchannel_pool", 1),  # do not inherit the back-off of a dead server's channel
)
_PROBE = encode_request(Probe(probe=True))


class TritonClient:
    """Calls one server.

    Args:
        address: host:port of its gRPC endpoint.
        key: what it requires for loading and unloading, as KEY=VALUE; None: nothing.
    """

    def __init__(self, address: str, key: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        name, _, value = (key or "").partition("=")
        self._key = ((f"triton-grpc-protocol-{name}", value),) if name else ()

    async def aclose(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        await self._channel.close()

    async def live(self, timeout_s: float) -> bool:
        """Ask whether the server is live."""
        try:
            return bool((await self._call("ServerLive", pb.ServerLiveRequest(), timeout_s)).live)
        except ModelError:
            return False

    async def load(self, entry: str) -> None:
        """Load `entry`; returns when it is ready, after its warm-up, which may take minutes.

        Raises:
            ModelError: Triton could not load it, or is gone.
        """
        await self._call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=entry), None)

    async def unload(self, entry: str, timeout_s: float) -> None:
        """Ask Triton to unload `entry`; it answers at once, and only then waits for the entry's streams.

        Raises:
            ModelError: Triton refused, or did not answer in time.
        """
        request = pb.RepositoryModelUnloadRequest(model_name=entry)
        await self._call("RepositoryModelUnload", request, timeout_s)

    async def unloaded(self, entry: str, timeout_s: float) -> bool:
        """Whether `entry` is not loaded, whatever the reason, or is being loaded or unloaded.

        Triton calls an entry ready whose process has died.

        Raises:
            ModelError: Triton did not say so in time.
        """
        index = await self._call("RepositoryIndex", pb.RepositoryIndexRequest(), timeout_s)
        for model in index.models:
            if model.name == entry:
                return model.state in {"", "UNAVAILABLE", "LOADING", "UNLOADING"}
        return True

    async def probe(self, entry: str, timeout_s: float) -> ProbeReport:
        """Ask the model of `entry` how its engine is.

        The stream is read to its end because of a leak in tritonserver 2.51: a stream that is cancelled while
        its final response is on the way keeps a reference to the model, so the entry can never be unloaded
        again.

        Raises:
            ModelError: the answer is an error, is late, or holds no report.
        """
        request = pb.ModelInferRequest(model_name=entry)
        for name, value in ((names.PROMPT, b""), (names.HISTORY, b""), (names.SAMPLING, _PROBE)):
            request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(strings.pack_strings([value]))
        # Without the empty final response, the stream of a request without answers would never end.
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s)
        report = None
        try:
            async for response in call:
                if response.error_message:
                    raise ModelError(response.error_message)
                outputs, raws = response.infer_response.outputs, response.infer_response.raw_output_contents
                for output, raw in zip(outputs, raws, strict=True):
                    if output.name == names.META:
                        report = decode_meta(strings.unpack_strings(raw)[0]).probe
        except grpc.RpcError as error:
            raise ModelError(error.details() or str(error.code())) from error
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            raise ModelError(f"an unreadable meta document: {error}") from error
        finally:
            call.cancel()
        if report is None:
            raise ModelError("the probe's answer holds no report")
        return report

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._key)
        except grpc.RpcError as error:
            raise ModelError(error.details() or str(error.code())) from error
