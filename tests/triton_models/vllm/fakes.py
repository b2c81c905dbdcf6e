"""Stand-ins for vLLM's engine and for what only Triton's stub has."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.triton_models.serving.fakes import TIMEOUT_S
from triton_models.errors import EngineStoppedError, InvalidRequestError
from triton_models.vllm.tensors import EmbeddingRequest, TextRequest


def output(*texts: str | None, finished: bool = False, reason: str | None = None) -> Any:
    """As vLLM's RequestOutput, in which choices without news are missing; a token is a character."""
    choices = [
        SimpleNamespace(
            index=index,
            text=text,
            token_ids=list(text.encode()),
            cumulative_logprob=-1.5,
            logprobs=[
                {ord(each): SimpleNamespace(logprob=-0.5, rank=1, decoded_token=each)} for each in text
            ],
            finish_reason=reason or ("stop" if finished else None),
        )
        for index, text in enumerate(texts)
        if text is not None
    ]
    return SimpleNamespace(outputs=choices, finished=finished, prompt_token_ids=[1, 2, 3])


class FakeEngine:
    """Answers `three` with three outputs; waits for ever on `wait`; fails on `bad`, `broken` and `die`."""

    def __init__(self) -> None:
        self.dead = False
        self.closed = False
        self.aborted: list[str] = []
        self.running = threading.Semaphore(0)
        self.death = asyncio.Event()

    async def generate(self, request: TextRequest) -> AsyncGenerator[tuple[Any, int], None]:
        match request.prompt:
            case "bad":
                raise InvalidRequestError("temperature is too hot")
            case "broken":
                raise RuntimeError("a secret of /opt/vllm")
        if self.dead:
            raise EngineStoppedError("dead")
        if request.prompt == "error":
            yield output("x", finished=True, reason="error"), 1
            return
        if request.prompt == "unfinished":
            yield output("x"), 1
            return
        try:
            if request.prompt == "wait":
                self.running.release()
                await self.death.wait()
                raise EngineStoppedError("dead")
            if not request.stream:
                yield output("abc", finished=True), 1
                return
            for text in "abc":
                yield output(text, finished=text == "c"), 1
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.prompt)
            raise

    async def embed(self, request: EmbeddingRequest) -> tuple[list[float], int]:
        return [0.5, 1.0], len(request.prompt)

    def close(self) -> None:
        self.closed = True


@dataclass
class Sender:
    """Triton's response sender."""

    gone: bool = False
    fails: bool = False
    responses: list[dict[str, list[Any]]] = field(default_factory=list)
    error: Any = None
    ended: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def send(self, response: Any, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response after the final one"
        if self.fails:
            self.fails = False
            raise RuntimeError("no shared memory")
        if response.error is not None:
            self.error = response.error
        else:
            self.responses.append({name: values.tolist() for name, values in response.output_tensors})
        if flags:
            self.ended.set()

    def is_cancelled(self) -> bool:
        assert not self.ended.is_set(), "asking about an ended request crashes the server"
        self.asked += 1
        return self.gone

    def wait(self) -> "Sender":
        assert self.ended.wait(TIMEOUT_S), "no final response"
        return self

    @property
    def text(self) -> bytes:
        return b"".join(response["text_output"][0] for response in self.responses)
