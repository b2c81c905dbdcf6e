"""Measures how long a model takes to answer legacy clients, over gRPC and HTTP, for `tritongate bench`.

Closed loop: a number of clients, each with its own connection, send the next request as soon as the last one
is answered. The form of the requests is read from the model's metadata, so that every contract is measured
with the same prompt. It speaks the KServe protocol, so a Triton with such a model can be measured, too.
"""

import http.client
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urlsplit

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.kserve.contracts import HISTORY, HISTORY_LEN, MAX_TOKEN, PROMPT, RESPONSE, TEMPERATURE
from wire.strings import pack_strings

_MESSAGE_LIMIT_BYTES = 64 * 2**20
_OPTIONS = (
    ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per client, as with HTTP
)


class TimingError(Exception):
    """Nothing can be measured; the message is one line for the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The requests to make: `count` in total, by `concurrency` clients."""

    model: str
    concurrency: int = 4
    count: int = 40
    prompt: str = "你好"
    temperature: float = 0.8
    max_token: int = 128
    history_len: int = 10
    timeout_s: float = 600.0
    key: str | None = None
    """The gateway's key; None: it needs none."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of each request, as gRPC metadata or HTTP's."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input tensor of every request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of one protocol's answered requests, in milliseconds."""

    protocol: str
    answered: int
    failed: int
    seconds: float
    """From the first request's start to the last one's end."""
    min: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    first_failure: str | None = None


class Client(Protocol):
    """One connection; used by one thread."""

    def ask(self) -> None:
        """Make one request and read its whole answer.

        Raises:
            TimingError: it failed.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def read_inputs(grpc_address: str, work: Work) -> list[Input]:
    """Read the model's metadata, and return the inputs of every request.

    Raises:
        TimingError: the server was not reached, or has no such model, or one of an unknown contract.
    """
    with grpc.insecure_channel(grpc_address, options=_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            metadata = stub.ModelMetadata(
                service_pb2.ModelMetadataRequest(name=work.model),
                timeout=work.timeout_s,
                metadata=work.headers,
            )
        except grpc.RpcError as error:
            raise TimingError(f"{grpc_address}: {error.details()}") from error
    return [_input(tensor.name, tensor.datatype, tuple(tensor.shape), work) for tensor in metadata.inputs]


def _input(name: str, datatype: str, declared: tuple[int, ...], work: Work) -> Input:
    said = {
        PROMPT: work.prompt,
        HISTORY: "",
        TEMPERATURE: f"{work.temperature:g}",
        MAX_TOKEN: str(work.max_token),
        HISTORY_LEN: str(work.history_len),
    }
    if name not in said or datatype not in ("BYTES", "INT16"):
        raise TimingError(f"{work.model} has the input {name} of {datatype}: no contract known here")
    if name == HISTORY and declared == (-1,):
        return Input(name=name, datatype=datatype, shape=(0,), values=())
    value = said[name]
    return Input(
        name=name,
        datatype=datatype,
        shape=tuple(1 if size < 0 else size for size in declared),
        values=(int(value),) if datatype == "INT16" else (value,),
    )


class GrpcClient:
    """Asks by ModelInfer.

    Args:
        address: `host:port`.
        work: the requests to make.
        inputs: their tensors.
    """

    def __init__(self, address: str, work: Work, inputs: Sequence[Input]) -> None:
        self._timeout_s, self._headers = work.timeout_s, work.headers
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._request = service_pb2.ModelInferRequest(model_name=work.model)
        for tensor in inputs:
            self._request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            self._request.raw_input_contents.append(_pack(tensor))

    def ask(self) -> None:
        """Make one request and read its whole answer."""
        try:
            answer = self._stub.ModelInfer(self._request, timeout=self._timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            raise TimingError(error.details()) from error
        if RESPONSE not in {output.name for output in answer.outputs}:
            raise TimingError("an answer without a response")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class HttpClient:
    """Asks by `POST /v2/models/M/infer`.

    Args:
        url: of the HTTP endpoint.
        work: the requests to make.
        inputs: their tensors.
    """

    def __init__(self, url: str, work: Work, inputs: Sequence[Input]) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise TimingError(f"{url} is not a URL of an HTTP endpoint, such as http://127.0.0.1:8000")
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=work.timeout_s)
        self._path = f"{parts.path.rstrip('/')}/v2/models/{quote(work.model)}/infer"
        tensors = [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "data": tensor.values,
            }
            for tensor in inputs
        ]
        self._headers = {"Content-Type": "application/json", **dict(work.headers)}
        self._body = json.dumps({"inputs": tensors}).encode()

    def ask(self) -> None:
        """Make one request and read its whole answer."""
        try:
            self._connection.request("POST", self._path, self._body, self._headers)
            response = self._connection.getresponse()
            document = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._connection.close()  # the next request reopens it
            raise TimingError(str(error) or type(error).__name__) from error
        if response.status != http.client.OK:
            raise TimingError(str(document.get("error", response.status)))
        if RESPONSE not in {output["name"] for output in document["outputs"]}:
            raise TimingError("an answer without a response")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def measure(protocol: str, connect: Callable[[], Client], work: Work) -> Timing:
    """Do `work` and return its times.

    Args:
        protocol: its name in the result.
        connect: makes a client's connection; called once per client.
        work: the requests to make.

    Raises:
        TimingError: no connection can be made.
    """
    run = _Run(work.count)
    clients = [connect() for _ in range(min(work.concurrency, work.count))]
    threads = [threading.Thread(target=run.work, args=(client,), daemon=True) for client in clients]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    times = sorted(run.times_ms)
    return Timing(
        protocol=protocol,
        answered=len(times),
        failed=run.failed,
        seconds=seconds,
        min=times[0] if times else math.nan,
        mean=sum(times) / len(times) if times else math.nan,
        p50=percentile(times, 50),
        p90=percentile(times, 90),
        p99=percentile(times, 99),
        max=times[-1] if times else math.nan,
        first_failure=run.first_failure,
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest of `ordered` that at least `percent` of them do not exceed; NaN if empty."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


class _Run:
    """The requests still to be made, shared by the clients' threads."""

    def __init__(self, count: int) -> None:
        self.times_ms: list[float] = []
        self.failed = 0
        self.first_failure: str | None = None
        self._left = count
        self._lock = threading.Lock()

    def work(self, client: Client) -> None:
        """Make requests until none is left."""
        while self._take():
            began = time.perf_counter()
            try:
                client.ask()
            except TimingError as error:
                with self._lock:
                    self.failed += 1
                    self.first_failure = self.first_failure or str(error)
            else:
                taken_ms = 1000 * (time.perf_counter() - began)
                with self._lock:
                    self.times_ms.append(taken_ms)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


def _pack(tensor: Input) -> bytes:
    if tensor.datatype == "INT16":
        return struct.pack(f"<{len(tensor.values)}h", *tensor.values)
    return pack_strings(str(value).encode() for value in tensor.values)
