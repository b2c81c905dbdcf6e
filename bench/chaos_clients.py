"""The clients of `bench.chaos`: each knows the answer that it must get, and says how its request ended."""

import asyncio
import enum
import itertools
import json
import random
import socket
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from bench.resume import Answer
from wire.strings import pack_strings, unpack_strings

LIMIT_S = 150.0
"""Nothing may take longer; the gateway itself ends every request well before."""
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


class Clients:
    """Everything that asks the gateway. Use as a context.

    Args:
        url: of the gateway.
        kserve: its address for KServe's gRPC.
        model: asked for.
    """

    def __init__(self, url: str, kserve: str, model: str) -> None:
        limits = httpx.Limits(max_connections=None)
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
            async with asyncio.timeout(stay_s):
                refusal = await self._chat(own, answer, case, dice, manner)
        except TimeoutError:
            if manner is not Manner.VANISHES:
                return Result(manner, Ending.WRONG, f"{own}: no ending within {LIMIT_S:g} s")
            ending, detail = Ending.LEFT, ""
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
        return Result(manner, ending, detail)

    async def _chat(
        self, own: str, answer: Answer, case: Case, dice: random.Random, manner: Manner
    ) -> str | None:
        """Read an answer; return the reason if there is an error instead of one.

        Raises:
            ValueError: what comes breaks a rule.
        """
        http = self.slow_http if manner is Manner.READS_SLOWLY else self.http
        headers = {"X-Request-Id": own}
        async with http.stream("POST", "/v1/chat/completions", json=case.body, headers=headers) as response:
            if (got := response.headers.get("x-request-id")) != own:
                raise ValueError(f"answered as {got}")
            if response.status_code != httpx.codes.OK:
                return _refused(response.status_code, await response.aread())
            if not case.body["stream"]:
                answer.add(json.loads(await response.aread()))
                return None
            await _read(response, answer, dice if manner is Manner.READS_SLOWLY else None)
        return None

    async def infer(self, dice: random.Random, case: KserveCase, *, vanishes: bool) -> Result:
        """Ask as Triton's clients do."""
        manner = Manner.KSERVE_VANISHES if vanishes else Manner.KSERVE
        own = f"chaos-{next(self._numbers)}"
        stay_s = dice.uniform(0, _LONGEST_STAY_S) if vanishes else LIMIT_S
        try:
            async with asyncio.timeout(stay_s):
                answer = await self._stub.ModelInfer(self._request(own, case.prompt))
        except TimeoutError:
            if vanishes:
                return Result(manner, Ending.LEFT)
            return Result(manner, Ending.WRONG, f"{own}: no ending within {LIMIT_S:g} s")
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            lost = not error.details() or any(part in said for part in _TRANSPORT)
            return Result(manner, Ending.WRONG if lost else Ending.REFUSED, said)
        if answer.id != own:
            return Result(manner, Ending.WRONG, f"asked as {own}, answered as {answer.id}")
        if (text := _response(answer)) != case.text:
            return Result(manner, Ending.WRONG, f"{own} differs: {case.text!r}, {text!r}")
        return Result(manner, Ending.ANSWERED)

    async def learn(self, prompt: str) -> KserveCase:
        """Return the case of a prompt, of which the answer is now the right one."""
        answer = await self._stub.ModelInfer(self._request("learn", prompt), timeout=LIMIT_S)
        return KserveCase(prompt, _response(answer))

    def _request(self, number: str, prompt: str) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self._model, id=number)
        tensors = {"prompt": prompt, "history": "", "temperature": "0", "max_token": "120"}
        for name, value in tensors.items():
            request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(pack_strings([value.encode()]))
        return request


async def _read(response: httpx.Response, answer: Answer, dice: random.Random | None) -> None:
    """Read a stream to its end, with random pauses if there are `dice`.

    Raises:
        ValueError: it has no end, or more than one.
    """
    ended = False
    async for line in response.aiter_lines():
        if dice is not None:
            await asyncio.sleep(dice.choice(_PAUSES_S))
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
