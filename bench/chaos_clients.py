"""The clients of `bench.chaos`: each knows the answer that it must get, and says how its request ended."""

import asyncio
import enum
import itertools
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from bench.resume import Answer
from wire.strings import pack_strings, unpack_strings

LIMIT_S = 150.0
"""Nothing may take longer, besides a slow reader's own pauses; the gateway itself ends every request well
before."""
_LONGEST_STAY_S = 5.0
"""Of clients that vanish."""
_PAUSES_S = (0.0, 0.0, 0.02, 0.1, 0.5)
"""Before a slow reader reads on."""
_SMALL_BUFFER = 2048
"""Bytes that the kernel keeps for a slow reader, so that the gateway has to wait for it."""
_DONE = "data: [DONE]"
_TRANSPORT = ("Socket closed", "Connection reset", "failed to connect", "Deadline Exceeded", "Stream removed")
"""Parts of what gRPC itself says when nobody has answered."""


class Ending(enum.StrEnum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    """As without the disturbance."""
    REFUSED = "refused"
    """With an error instead of an answer."""
    BROKEN_OFF = "broken off"
    """The beginning of the right answer, and then an error."""
    LOST = "lost"
    """At most the beginning of the right answer, and then the end of the connection."""
    LEFT = "left"
    """The client went away, with at most the beginning of the right answer."""
    WRONG = "WRONG"


class Manner(enum.StrEnum):
    """What a client is like."""

    STREAMS = "streams"
    WAITS = "waits"
    READS_SLOWLY = "reads slowly"
    VANISHES = "vanishes"
    KSERVE = "KServe gRPC"
    KSERVE_HTTP = "KServe HTTP"
    KSERVE_VANISHES = "KServe, vanishes"


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and its undisturbed answer."""

    body: dict[str, Any]
    answer: Answer


@dataclass(frozen=True, slots=True)
class KserveCase:
    """A prompt, and the text of its undisturbed answer."""

    prompt: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended."""

    manner: Manner
    ending: Ending
    detail: str = ""
    own: str = ""
    """Its id."""
    began: float = 0.0
    """By `time.monotonic`, as the next."""
    ended: float = 0.0


class Clients:
    """Everything that asks the gateway. Use as a context.

    Args:
        url: of the gateway.
        kserve: its address for KServe's gRPC.
        model: asked for.
    """

    def __init__(self, url: str, kserve: str, model: str) -> None:
        # Each request has a connection of its own. In a late event loop httpx closes idle ones that it just
        # gave to another request; and the gateway may close one in the moment in which it is taken up.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._model = model
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits)
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)]
        transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=small)
        self.slow_http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S, transport=transport)
        self._channel = grpc.aio.insecure_channel(kserve)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._numbers = itertools.count()

    async def close(self) -> None:
        """Close all connections."""
        await self.http.aclose()
        await self.slow_http.aclose()
        await self._channel.close()

    async def ask(self, dice: random.Random, cases: list[Case], kserve: list[KserveCase]) -> Result:
        """Make a request of a random kind."""
        began = time.monotonic()
        result = await self._ask(dice, cases, kserve)
        return replace(result, began=began, ended=time.monotonic())

    async def _ask(self, dice: random.Random, cases: list[Case], kserve: list[KserveCase]) -> Result:
        if dice.random() < 0.25:  # noqa: PLR2004
            return await self.infer(dice, dice.choice(kserve), vanishes=dice.random() < 0.25)  # noqa: PLR2004
        case = dice.choice(cases)
        manner = dice.choice((None, None, Manner.VANISHES, Manner.READS_SLOWLY))
        if manner is None or (manner is Manner.READS_SLOWLY and not case.body["stream"]):
            manner = Manner.STREAMS if case.body["stream"] else Manner.WAITS
        return await self.chat(dice, case, manner)

    async def chat(self, dice: random.Random, case: Case, manner: Manner) -> Result:
        """Ask for a chat completion."""
        own, answer = f"chaos-{next(self._numbers)}", Answer()
        stay_s = dice.uniform(0, _LONGEST_STAY_S) if manner is Manner.VANISHES else LIMIT_S
        try:
            async with asyncio.timeout(stay_s) as patience:
                slowly = partial(_slowly, dice=dice, patience=patience)
                refusal = await self._chat(
                    own, answer, case, slowly if manner is Manner.READS_SLOWLY else None
                )
        except TimeoutError:
            if manner is not Manner.VANISHES:
                came = sum(map(len, answer.texts.values()))
                detail = f"{own}: no ending within {LIMIT_S:g} s, after {came} characters"
                return Result(manner, Ending.WRONG, detail, own)
            ending, detail = Ending.LEFT, ""
        except httpx.TransportError as error:
            ending, detail = Ending.LOST, f"{own}: {error!r}"
        except (httpx.HTTPError, ValueError) as error:
            return Result(manner, Ending.WRONG, f"{own}: {error!r}")
        else:
            if refusal is not None:
                return Result(manner, Ending.REFUSED, refusal)
            if answer.error is None:
                difference = case.answer.differs(answer)
                ending = Ending.ANSWERED if difference is None else Ending.WRONG
                return Result(manner, ending, "" if difference is None else f"{own} differs: {difference}")
            ending, detail = Ending.BROKEN_OFF, answer.error
        if not _begins(answer, case.answer):
            return Result(manner, Ending.WRONG, f"{own}: {answer.texts!r} begins {case.answer.texts!r}")
        return Result(manner, ending, detail, own)

    async def _chat(
        self,
        own: str,
        answer: Answer,
        case: Case,
        slowly: Callable[[AsyncIterator[str]], AsyncIterator[str]] | None,
    ) -> str | None:
        """Read an answer; return the reason if there is an error instead of one.

        `slowly`: reads a slow reader's lines.

        Raises:
            ValueError: what comes breaks a rule.
        """
        http = self.http if slowly is None else self.slow_http
        headers = {"X-Request-Id": own}
        async with http.stream("POST", "/v1/chat/completions", json=case.body, headers=headers) as response:
            if (got := response.headers.get("x-request-id")) != own:
                raise ValueError(f"answered as {got}")
            if response.status_code != httpx.codes.OK:
                return _refused(response.status_code, await response.aread())
            if not case.body["stream"]:
                answer.add(json.loads(await response.aread()))
                return None
            lines = response.aiter_lines()
            await _read(lines if slowly is None else slowly(lines), answer)
        return None

    async def infer(self, dice: random.Random, case: KserveCase, *, vanishes: bool) -> Result:
        """Ask as Triton's clients do, over gRPC or HTTP."""
        over_http = dice.random() < 0.5  # noqa: PLR2004
        manner = Manner.KSERVE_HTTP if over_http else Manner.KSERVE
        manner = Manner.KSERVE_VANISHES if vanishes else manner
        own = f"chaos-{next(self._numbers)}"
        stay_s = dice.uniform(0, _LONGEST_STAY_S) if vanishes else LIMIT_S
        try:
            async with asyncio.timeout(stay_s):
                ending, detail = await (self._infer_http if over_http else self._infer)(own, case)
        except TimeoutError:
            ending, detail = Ending.LEFT, ""
            if not vanishes:
                ending, detail = Ending.WRONG, f"{own}: no ending within {LIMIT_S:g} s"
        return Result(manner, ending, detail, own)

    async def _infer(self, own: str, case: KserveCase) -> tuple[Ending, str]:
        try:
            answer = await self._stub.ModelInfer(self._request(own, case.prompt))
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            lost = not error.details() or any(part in said for part in _TRANSPORT)
            return Ending.LOST if lost else Ending.REFUSED, said
        return _compared(own, answer.id, case, _response(answer))

    async def _infer_http(self, own: str, case: KserveCase) -> tuple[Ending, str]:
        inputs = [
            {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}
            for name, value in _tensors(case.prompt).items()
        ]
        body = {"id": own, "inputs": inputs, "outputs": [{"name": "response"}]}
        try:
            response = await self.http.post(f"/v2/models/{self._model}/infer", json=body)
            document = response.json()
            if response.status_code != httpx.codes.OK:
                return Ending.REFUSED, f"{response.status_code}: {document['error']}"
            (output,) = document["outputs"]
            return _compared(own, document["id"], case, output["data"][0].encode())
        except httpx.TransportError as error:
            return Ending.LOST, f"{own}: {error!r}"
        except (ValueError, LookupError, TypeError) as error:
            return Ending.WRONG, f"{own}: {error!r}"

    async def learn(self, prompt: str) -> KserveCase:
        """Return the case of a prompt, of which the answer is now the right one."""
        answer = await self._stub.ModelInfer(self._request("learn", prompt), timeout=LIMIT_S)
        return KserveCase(prompt, _response(answer))

    def _request(self, number: str, prompt: str) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self._model, id=number)
        for name, value in _tensors(prompt).items():
            request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(pack_strings([value.encode()]))
        return request


def _compared(own: str, number: str, case: KserveCase, text: bytes) -> tuple[Ending, str]:
    if number != own:
        return Ending.WRONG, f"asked as {own}, answered as {number}"
    if text != case.text:
        return Ending.WRONG, f"{own} differs: {case.text!r}, {text!r}"
    return Ending.ANSWERED, ""


def _tensors(prompt: str) -> dict[str, str]:
    return {"prompt": prompt, "history": "", "temperature": "0", "max_token": "120"}


async def _slowly(
    lines: AsyncIterator[str], dice: random.Random, patience: asyncio.Timeout
) -> AsyncIterator[str]:
    """Yield the lines after pauses, which are added to the reader's patience as long as they really were.

    A pause of nothing takes as long as 200 clients of one process keep each other waiting, and an answer has
    hundreds of lines: only the time for which it waits for a line is the gateway's.
    """
    loop = asyncio.get_running_loop()
    async for line in lines:
        began, ends = loop.time(), patience.when()
        patience.reschedule(None)
        await asyncio.sleep(dice.choice(_PAUSES_S))
        if ends is not None:
            patience.reschedule(ends + loop.time() - began)
        yield line


async def _read(lines: AsyncIterator[str], answer: Answer) -> None:
    """Read a stream to its end.

    Raises:
        ValueError: it has no end, or more than one.
    """
    ended = False
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if ended or (answer.error is not None and line != _DONE):
            raise ValueError(f"more after the end: {line[:200]}")
        if line == _DONE:
            ended = True
            continue
        before, document = set(answer.reasons), json.loads(line.removeprefix("data: "))
        answer.add(document)
        for choice in document.get("choices", ()):
            if choice["index"] in before and (choice["finish_reason"] or choice["delta"].get("content")):
                raise ValueError(f"choice {choice['index']} goes on after its end")
    if not ended and answer.error is None:
        raise ValueError("the stream was cut")


def _refused(status: int, body: bytes) -> str:
    """Return what an error says.

    Raises:
        ValueError: it is none of the gateway's.
    """
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"status {status} without an error: {body[:200]!r}") from None


def _begins(answer: Answer, whole: Answer) -> bool:
    return len(answer.ids) <= 1 and all(
        whole.texts.get(index, "").startswith(text) for index, text in answer.texts.items()
    )


def _response(answer: pb.ModelInferResponse) -> bytes:
    number = [output.name for output in answer.outputs].index("response")
    return unpack_strings(answer.raw_output_contents[number])[0]
