"""The readers of foreign bytes that `bench.fuzz` tries, with examples, and the errors that they promise."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from gateway.chat.marked import MarkedText
from gateway.chat.styles import STYLES
from gateway.commands.http_client import Connection, HttpError
from gateway.commands.load_rows import Answer
from gateway.core.request import Generation, Turns
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.kserve import grpc as kserve_grpc
from gateway.kserve.contracts import SIGNATURES, InferRequest, read_questions
from gateway.kserve.history import Shape, encode_history, parse_flat, parse_history
from gateway.kserve.http import read_infer_request
from gateway.kserve.logits import read_prompts, read_texts
from gateway.triton.buffer import DeltaBuffer
from gateway.triton.dialects import tensors
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm_answer import ChatGLMAnswer, read
from wire.calls import NOTATIONS, write_fenced
from wire.channel import Frame, decode_frame, encode_frame
from wire.meta import Accepted, Meta, encode_meta
from wire.request import decode_request, encode_request
from wire.strings import pack_strings, unpack_strings


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads, inputs to begin with, and the errors with which it may refuse others."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]


_VALUES = {"prompt": "你好", "history": "[]", "temperature": "0.5", "max_token": "40"}


def _kserve(request: InferRequest, chat_format: str) -> None:
    """Read a request as one of each contract."""
    for contract in SIGNATURES:
        with suppress(InvalidRequestError):
            read_questions(contract, request, chat_format)
    with suppress(InvalidRequestError):
        read_prompts(request, 300, 2**20)
    with suppress(InvalidRequestError):
        read_texts(request)


def _kserve_http(data: bytes) -> None:
    """Read a body behind the two bytes that say how much of it is JSON."""
    length = int.from_bytes(data[:2], "little")
    request, binary = read_infer_request("glm", "", data[2:], str(length) if length else None)
    binary("response")
    _kserve(request, "chatglm3")


def _http_seeds() -> tuple[bytes, ...]:
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [[value]]}
        for name, value in _VALUES.items()
    ]
    plain = json.dumps({"inputs": inputs, "outputs": [{"name": "response"}]}).encode()
    blobs = [pack_strings([value.encode()]) for value in _VALUES.values()]
    sized = [
        {"name": name, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(blob)}}
        for name, blob in zip(_VALUES, blobs, strict=True)
    ]
    head = json.dumps({"id": "1", "inputs": sized, "parameters": {"binary_data_output": True}}).encode()
    number = {"name": "history_len", "datatype": "INT16", "shape": [1], "data": [5]}
    short = json.dumps({"inputs": [number], "parameters": {"timeout": 5}}).encode()
    matrices = [
        {"name": name, "datatype": "INT64", "shape": [2, 2], "data": [[1, 1], [0, 1]]}
        for name in ("input_ids", "attention_mask")
    ]
    numbers = b"\0\0" + json.dumps({"inputs": matrices}).encode()
    return numbers, b"\0\0" + plain, len(head).to_bytes(2, "little") + head + b"".join(blobs), b"\0\0" + short


def _kserve_grpc(data: bytes) -> None:
    request = kserve_grpc._read(pb.ModelInferRequest.FromString(data))  # noqa: SLF001 - the reader itself
    _kserve(request, "chatglm2")


def _grpc_seeds() -> tuple[bytes, ...]:
    raw = pb.ModelInferRequest(model_name="glm", id="1")
    typed = pb.ModelInferRequest(model_name="glm")
    typed.parameters["timeout"].int64_param = 9
    for name, value in _VALUES.items():
        raw.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        raw.raw_input_contents.append(pack_strings([value.encode()]))
        tensor = typed.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value.encode())
    number = typed.inputs.add(name="history_len", datatype="INT16", shape=[1])
    number.contents.int_contents.append(5)
    return raw.SerializeToString(), typed.SerializeToString()


def _calls(data: bytes) -> None:
    """Read a call, and what a call that was read is written as."""
    text = data.decode(errors="replace")
    for notation in NOTATIONS.values():
        arguments = notation.read(text)
        if arguments is not None and notation.read(notation.write(arguments)) is None:
            raise AssertionError(f"written so that it cannot be read: {arguments!r}")


def _marked(data: bytes) -> None:
    """Read an answer with marks, whole and in pieces: in no case may a character be read twice."""
    text = data[1:].decode(errors="replace")
    for style in STYLES.values():
        reader = MarkedText(style, ("get_weather", "f"), thinks=True, single=bool(data[:1] > b"\x7f"))
        step = 1 + (data[0] % 16 if data else 0)
        for begin in range(0, len(text), step):
            reader.push(text[begin : begin + step])
        reader.end()
        if not 0 <= reader.decided <= len(text):
            raise AssertionError(f"{reader.decided} characters of {len(text)} are decided")


def _histories(data: bytes) -> None:
    try:
        encode_history(parse_history(data, Shape.PAIRS))
    except InvalidRequestError:
        encode_history(parse_flat(unpack_strings(data)))


class _Transport(asyncio.Transport):
    """Takes what is sent, and is open until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = False

    def write(self, data: object) -> None:
        """Send nothing."""

    def close(self) -> None:
        self._closed = True

    def is_closing(self) -> bool:
        return self._closed


_loop = asyncio.new_event_loop()


def _sse(data: bytes) -> None:
    """Read an HTTP answer with events, in pieces of a length that the first byte says."""
    step = 1 + (data[0] if data else 0)
    _loop.run_until_complete(_answer([data[at : at + step] for at in range(1, len(data), step)]))


async def _answer(pieces: list[bytes]) -> None:
    connection, transport = Connection(), _Transport()
    connection.connection_made(transport)
    asked = asyncio.ensure_future(connection.post(b"", Answer(sent=0.0).take_event))
    await asyncio.sleep(0)
    for piece in pieces:
        if not transport.is_closing():
            connection.data_received(piece)
    connection.connection_lost(None)
    await asked


def _sse_seeds() -> tuple[bytes, ...]:
    chunk = json.dumps({"choices": [{"delta": {"content": "你好"}, "finish_reason": None}]}).encode()
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}).encode()
    events = b"".join(b"data: %b\n\n" % each for each in (chunk, usage, b"[DONE]"))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (events[:20], events[20:]))
    return (
        b"\xff" + head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        b"\x08" + head + b"Content-Length: %d\r\n\r\n%b" % (len(events), events),
        b"\x20HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}",
    )


_REPORT = ModelReport(chat_format="chatglm3", max_context=64)


def _response(text: str, document: bytes) -> bytes:
    response = pb.ModelInferResponse(model_name="glm")
    for name, value in (("response", text.encode()), ("meta", document)):
        response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        response.raw_output_contents.append(pack_strings([value]))
    return bytes(response.SerializeToString())


_ACCEPTED = _response("", encode_meta(Meta(accepted=Accepted(request_id="1", prompt_tokens=3))))


def _begun() -> ChatGLMAnswer:
    generation = Generation(request_id="1", model="glm", prompt=Turns((), "a"), deadline=0.0, n=3, logprobs=2)
    answer = ChatGLMAnswer(generation, _REPORT)
    answer.decode(pb.ModelInferResponse.FromString(_ACCEPTED))
    return answer


def _frames(data: bytes) -> None:
    """Read a frame, and its deltas as those of an answer with three choices."""
    frame = decode_frame(data)
    buffer, answer = DeltaBuffer(range(3), 0.0), _begun()
    for place, stream in enumerate(frame.streams):
        if stream in range(3):
            document = frame.metas.get(place)
            details = None if document is None else bytes(document)
            ids = frame.ids[place] if frame.ids else ()
            buffer.put(stream, frame.texts[place], frame.tokens[place], details, 0.0, ids=ids)
    answer.deltas(buffer.take_deltas())


def _frame_seeds() -> tuple[bytes, ...]:
    meta = msgspec.Raw(b'{"index":1,"tokens":1,"segments":[{"at":0,"role":"assistant"}]}')
    return (
        encode_frame(Frame(frame=0)),
        encode_frame(Frame(frame=7, streams=[0, 2], tokens=[1, 2], texts=["one", "你"], ids=[[3], [4, 5]])),
        encode_frame(Frame(frame=8, streams=[0, 1], tokens=[1, 1], texts=["a", "b"], metas={1: meta})),
    )


def _responses(data: bytes) -> None:
    response = pb.ModelInferResponse.FromString(data)
    tensors.outputs(response)
    read(response)
    _begun().decode(response)


_FENCED = write_fenced({"city": "北京", "days": 3, "places": [{"x": 1.5}, None, True]}).encode()

READERS = {
    "kserve-http": Reader(_kserve_http, _http_seeds(), (InvalidRequestError,)),
    "kserve-grpc": Reader(_kserve_grpc, _grpc_seeds(), (InvalidRequestError, DecodeError)),
    "calls": Reader(_calls, (_FENCED, b'{"city": "x", "days": [1, {"a": null}]}'), ()),
    "marked-text": Reader(
        _marked,
        (
            b'\1<think>so</think>said <tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>',
            b"\5<tool_call>get_weather\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            b'\3[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        ),
        (),
    ),
    "histories": Reader(
        _histories,
        (
            b'[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "metadata": ""}]',
            b"[('a', 'b'), ['c', 'd']]",
            pack_strings([b"a", b"b"]),
        ),
        (InvalidRequestError, ValueError),
    ),
    "sse": Reader(_sse, _sse_seeds(), (HttpError,)),
    "frames": Reader(_frames, _frame_seeds(), (msgspec.MsgspecError, UpstreamProtocolError)),
    "responses": Reader(
        _responses,
        (
            _ACCEPTED,
            _response("a", b'{"index":0,"tokens":2,"finish_reason":"stop"}'),
            _response("", b"{}"),
        ),
        (DecodeError, UpstreamProtocolError),
    ),
    "requests": Reader(
        lambda data: encode_request(decode_request(data)),
        (
            b'{"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "channel": {"id": "a", "stream": 1}}',
            b'{"tokenize": "text"}',
            b'{"open_channel": "abc"}',
            b'{"probe": true}',
        ),
        (msgspec.MsgspecError,),
    ),
}
