"""The commands that are clients of something already running: `load`, `unload` and `bench-kserve`.

`bench-kserve` speaks the KServe protocol, so a Triton with such a model can be measured, too. The form of its
requests is read from the model's metadata, so that every contract is measured with the same prompt.
"""

import http.client
import json
import math
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import click
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.commands.endpoint import DEFAULT_URL, ClientError, authorization, connected, fetch
from gateway.commands.load_rows import percentile
from gateway.kserve.contracts import (
    HEADER_LENGTH,
    HISTORY,
    HISTORY_LEN,
    MAX_TOKEN,
    PROMPT,
    RESPONSE,
    TEMPERATURE,
)
from gateway.kserve.logits import ATTENTION_MASK, INPUT_IDS, LOGITS, TEXT
from wire.strings import pack_strings

_MESSAGE_LIMIT_BYTES = 2**31 - 1
_FORMS = {"INT16": "h", "INT64": "q"}
_OPTIONS = (
    ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per client, as with HTTP
)


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
    rows: int = 1
    """Of a request for logits, or to tokenize."""
    positions: int = 64
    """Ids in each row of a request for logits."""
    json_numbers: bool = False
    """Whether numbers come as JSON over HTTP, too, and not as bytes."""
    timeout_s: float = 600.0
    key: str | None = None
    """The gateway's key; None: it needs none."""


Input = dict[str, Any]
"""An input tensor of every request, as KServe's JSON has it: name, datatype, shape, data."""
Ask = Callable[[], None]
"""Makes one request and reads its whole answer; raises ClientError if that failed."""


def read_inputs(grpc_address: str, work: Work) -> list[Input]:
    """Read the model's metadata, and return the inputs of every request.

    Raises:
        ClientError: the server was not reached, or has no such model, or one of an unknown contract.
    """
    with grpc.insecure_channel(grpc_address, options=_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelMetadataRequest(name=work.model)
        try:
            metadata = stub.ModelMetadata(request, timeout=work.timeout_s, metadata=authorization(work.key))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                way = "`tritongate up` starts a gateway, --grpc names another address"
                raise ClientError(f"cannot reach {grpc_address}: {error.details()}; {way}") from error
            raise ClientError(f"{grpc_address}: {error.details()}") from error
    return [_input(tensor.name, tensor.datatype, list(tensor.shape), work) for tensor in metadata.inputs]


def _input(name: str, datatype: str, declared: list[int], work: Work) -> Input:
    data: list[str] | list[int]
    said = {
        PROMPT: work.prompt,
        HISTORY: "",
        TEMPERATURE: f"{work.temperature:g}",
        MAX_TOKEN: str(work.max_token),
        HISTORY_LEN: str(work.history_len),
    }
    if name in {INPUT_IDS, ATTENTION_MASK} and datatype == "INT64":
        numbers = [1 if name == ATTENTION_MASK else 5 + place % 256 for place in range(work.positions)]
        shape = [work.rows, work.positions]
        return {"name": name, "datatype": datatype, "shape": shape, "data": numbers * work.rows}
    if name == TEXT:
        data = [work.prompt] * work.rows
        return {"name": name, "datatype": datatype, "shape": [work.rows], "data": data}
    if name not in said or datatype not in ("BYTES", "INT16"):
        raise ClientError(f"{work.model} has the input {name} of {datatype}: no contract known here")
    shape = [1 if size < 0 else size for size in declared]
    data = [int(said[name])] if datatype == "INT16" else [said[name]]
    if name == HISTORY and declared == [-1]:
        shape, data = [0], []
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


@contextmanager
def grpc_client(address: str, work: Work, inputs: Sequence[Input]) -> Iterator[Ask]:
    """Connect to `address`, host:port, and ask by ModelInfer."""
    request = service_pb2.ModelInferRequest(model_name=work.model)
    for tensor in inputs:
        request.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        data = tensor["data"]
        form = _FORMS.get(tensor["datatype"])
        raw = struct.pack(f"<{len(data)}{form}", *data) if form else pack_strings(map(str.encode, data))
        request.raw_input_contents.append(raw)
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer

        def ask() -> None:
            try:
                answer = infer(request, timeout=work.timeout_s, metadata=authorization(work.key))
            except grpc.RpcError as error:
                raise ClientError(error.details()) from error
            _check_outputs(output.name for output in answer.outputs)

        yield ask


@contextmanager
def http_client(url: str, work: Work, inputs: Sequence[Input]) -> Iterator[Ask]:
    """Connect to `url` and ask by `POST /v2/models/M/infer`; raises ClientError for what is no URL."""
    headers = {"Content-Type": "application/json", **dict(authorization(work.key))}
    binary = not work.json_numbers and any(tensor["datatype"] == "INT64" for tensor in inputs)
    options = {"parameters": {"binary_data_output": True}} if binary else {}
    body = json.dumps({"inputs": inputs, **options}).encode()
    with connected(url, work.timeout_s) as (connection, prefix):

        def ask() -> None:
            try:
                connection.request("POST", f"{prefix}/v2/models/{quote(work.model)}/infer", body, headers)
                response = connection.getresponse()
                answer = response.read()
                length = response.getheader(HEADER_LENGTH)
                document = json.loads(answer if length is None else answer[: int(length)])
            except (OSError, ValueError, http.client.HTTPException) as error:
                connection.close()  # the next request reopens it
                raise ClientError(str(error) or type(error).__name__) from error
            if response.status != http.client.OK:
                raise ClientError(str(document.get("error", response.status)))
            _check_outputs(output["name"] for output in document["outputs"])

        yield ask


def _check_outputs(names: Iterator[str]) -> None:
    if {RESPONSE, LOGITS, INPUT_IDS}.isdisjoint(names):
        raise ClientError("an answer without a response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What became of the requests by one protocol."""

    protocol: str
    seconds: float
    """From the first request's start to the last one's end."""
    times_ms: Sequence[float]
    """Of those that were answered, ascending."""
    failures: Sequence[str]
    """Why the others failed, in their order."""

    def rows(self) -> dict[str, str | float]:
        """Return what is shown, by name; times are in milliseconds."""
        times = self.times_ms or [math.nan]
        return {
            "protocol": self.protocol,
            "answered": len(self.times_ms),
            "failed": len(self.failures),
            "seconds": self.seconds,
            "min": percentile(times, 0),
            "mean": statistics.fmean(times),
            "p50": percentile(times, 50),
            "p90": percentile(times, 90),
            "p99": percentile(times, 99),
            "max": percentile(times, 100),
        }


def measure(protocol: str, connect: Callable[[], AbstractContextManager[Ask]], work: Work) -> Timing:
    """Do `work` in a closed loop: each client sends its next request as soon as the last one is answered.

    Args:
        protocol: its name in the result.
        connect: makes a client's connection; called once per client.
        work: the requests to make.

    Raises:
        ClientError: no connection can be made.
    """
    times_ms: list[float] = []
    failures: list[str] = []
    requests = iter(range(work.count))  # shared: the interpreter's lock gives each to one thread

    def run(ask: Ask) -> None:
        for _ in requests:
            began = time.perf_counter()
            try:
                ask()
            except ClientError as error:
                failures.append(str(error))
            else:
                times_ms.append(1000 * (time.perf_counter() - began))

    with ExitStack() as connections:
        clients = [connections.enter_context(connect()) for _ in range(min(work.concurrency, work.count))]
        threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
    return Timing(protocol=protocol, seconds=seconds, times_ms=sorted(times_ms), failures=failures)


def _of(work: Work, inputs: Sequence[Input]) -> str:
    """Return what the requests have in common, for a person."""
    names = {tensor["name"] for tensor in inputs}
    if not names.isdisjoint({INPUT_IDS, TEXT}):
        return f"{work.rows} rows" + (f" of {work.positions} ids" if INPUT_IDS in names else "")
    return f"max_token {work.max_token}, temperature {work.temperature:g}"


F = TypeVar("F", bound=Callable[..., Any])


def _gateway_options(command: F) -> F:
    for option in (
        click.option("--upstream", metavar="HOST:PORT", help="on this Triton only"),
        click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key with the scope admin"),
        click.option("--url", default=DEFAULT_URL, show_default=True, help="of the gateway"),
    ):
        command = option(command)
    return command


@click.command(short_help="Load a model of a running gateway.")
@click.argument("model")
@click.option("--reload", is_flag=True, help="unload it first if it is loaded")
@_gateway_options
def load(*, model: str, reload: bool, url: str, key: str | None, upstream: str | None) -> None:
    """Have a running gateway load MODEL, and wait until it is ready."""
    _change(url, key, model, "load", {"reload": reload, "upstream": upstream})


@click.command(short_help="Unload a model of a running gateway.")
@click.argument("model")
@_gateway_options
def unload(*, model: str, url: str, key: str | None, upstream: str | None) -> None:
    """Have a running gateway unload MODEL, and wait until its requests in flight have ended."""
    _change(url, key, model, "unload", {"upstream": upstream})


def _change(url: str, key: str | None, model: str, action: str, options: dict[str, Any]) -> None:
    answer = fetch(url, key, f"/v1/models/{quote(model, safe='/')}/{action}", options)
    for change in answer["changes"]:
        entries = ", ".join(change["entries"])
        done = f"{action}ed {entries}" if entries else f"nothing to {action}"
        click.echo(f"{change['upstream']}: {done}")
    state = "ready" if answer["model"]["ready"] else "not ready"
    click.echo(f"{model} is {'unloaded' if answer['model'].get('unloaded') else state}")


@click.command("bench-kserve", short_help="Measure a model through Triton's protocol.")
@click.option("--model", required=True, help="model to ask")
@click.option("--grpc", "grpc_address", default="127.0.0.1:8001", show_default=True, help="for KServe")
@click.option("--http", "http_url", default="http://127.0.0.1:8000", show_default=True, help="for KServe")
@click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key of the gateway")
@click.option("--protocol", type=click.Choice(["both", "grpc", "http"]), default="both", show_default=True)
@click.option(
    "--concurrency", type=click.IntRange(1, 1024), default=4, show_default=True, help="clients at once"
)
@click.option(
    "--count", type=click.IntRange(1), default=40, show_default=True, help="requests in all, of each protocol"
)
@click.option("--prompt", default="你好", show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.8, show_default=True)
@click.option(
    "--max-token",
    type=click.IntRange(1, 2**15 - 1),
    default=128,
    show_default=True,
    help="limit on prompt and answer together",
)
@click.option(
    "--history-len", type=click.IntRange(0, 2**15 - 1), default=10, show_default=True, help="in rounds"
)
@click.option(
    "--rows", type=click.IntRange(1, 64), default=1, show_default=True, help="of logits and tokenizers"
)
@click.option(
    "--positions", type=click.IntRange(1), default=64, show_default=True, help="ids in each row of logits"
)
@click.option("--json-numbers", is_flag=True, help="numbers come as JSON over HTTP, not as bytes")
def bench_kserve(*, grpc_address: str, http_url: str, protocol: str, **options: Any) -> None:
    """Time a model as clients of Triton ask it, over gRPC and HTTP side by side.

    Each client sends its next request as soon as it has an answer. Status 1 if a request failed.
    """
    work = Work(**options)
    inputs = read_inputs(grpc_address, work)
    connect: dict[str, Callable[[], AbstractContextManager[Ask]]] = {
        "grpc": lambda: grpc_client(grpc_address, work, inputs),
        "http": lambda: http_client(http_url, work, inputs),
    }
    chosen = connect if protocol == "both" else {protocol: connect[protocol]}
    timings = [measure(name, make, work) for name, make in chosen.items()]
    click.echo(
        f"{work.model}: {work.count} requests by {work.concurrency} clients, {_of(work, inputs)}; times in ms"
    )
    columns = [timing.rows() for timing in timings]
    for name in columns[0]:
        cells = [f"{value:.1f}" if isinstance(value := row[name], float) else str(value) for row in columns]
        click.echo("  ".join([f"{name:8}", *(f"{cell:>12}" for cell in cells)]))
    for timing in timings:
        if timing.failures:
            click.echo(
                f"{timing.protocol}: the first of {len(timing.failures)} failures: {timing.failures[0]}"
            )
    sys.exit(1 if any(timing.failures for timing in timings) else 0)
