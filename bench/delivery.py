"""Measures the CPU time per token that the serving process needs to get tokens from the engine to Triton.

The engine only sleeps and the responders discard their input, so what is measured is our own code:
detokenising, looking for stop strings, filling frames, encoding. Triton's own `send` (70-90 microseconds per
response) is not included.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from triton_models.engine.engine import EngineStats, StepStats
from triton_models.engine.sequence import FinishReason, TokenOutput
from triton_models.engine.sequence import Request as EngineRequest
from triton_models.engine.settings import EngineSettings
from triton_models.options import EntryParameters
from triton_models.serving.chat_text import load_text
from triton_models.serving.intake import Arrival, Inputs
from triton_models.serving.service import Service
from wire.channel import Frame, encode_frame
from wire.meta import Meta, encode_meta
from wire.refusal import RefusalCode
from wire.request import ChannelStream, Generation, OpenChannel, Request, encode_request

_STEP_S = 0.005
_FIRST_PIECE = 300
"""The first id used: those before it include the control and byte pieces, which are rare in text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """One measurement of the serving process; times are microseconds of CPU time per token."""

    streams: int
    tokens: int
    responses: int
    engine_thread: float
    """Excluding the time to create the outputs."""
    other_threads: float


def measure(checkpoint: Path, streams: tuple[int, ...], *, new_tokens: int) -> Iterator[DeliveryRow]:
    """Measure each number of concurrent streams over one delta channel."""
    for number in streams:
        yield _run(checkpoint, number, new_tokens)


def _run(checkpoint: Path, streams: int, new_tokens: int) -> DeliveryRow:
    text = load_text(
        EntryParameters(model="bench", checkpoint=checkpoint, device="cpu", version=1, options={})
    )
    vocabulary = text.tokenizer.size
    engine = _SleepingEngine(vocabulary, new_tokens)
    service = Service(cast("Any", engine), text, cast("Any", _no_metrics()), vocabulary=vocabulary)
    service.start()
    service.submit([_arrival(_Responder(), b"", OpenChannel("c"))])
    responders = [_Responder() for _ in range(streams)]
    for number, responder in enumerate(responders):
        channel = ChannelStream(id="c", stream=number)
        generation = Generation(max_tokens=new_tokens, ignore_eos=True, channel=channel)
        service.submit([_arrival(responder, b"x", generation)])
    while engine.stats().running < streams:
        time.sleep(0.01)
    before = _thread_seconds()
    sent = _Responder.sent
    engine.started.set()
    for responder in responders:
        responder.ended.wait()
    spent = {name: seconds - before[name] for name, seconds in _thread_seconds().items() if name in before}
    responses = _Responder.sent - sent
    service.close()
    of_engine = spent.pop("engine")
    tokens = streams * new_tokens
    return DeliveryRow(
        streams=streams,
        tokens=tokens,
        responses=responses,
        engine_thread=1e6 * (of_engine - engine.making_s) / tokens,
        other_threads=1e6 * sum(spent.values()) / tokens,
    )


def _arrival(responder: "_Responder", prompt: bytes, request: Request) -> Arrival:
    return Arrival(cast("Any", responder), Inputs(prompt, b"", encode_request(request)))


def _thread_seconds() -> dict[str, float]:
    """Return the CPU time of each thread so far."""
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def _no_metrics() -> SimpleNamespace:
    def note(*_: object) -> None:
        """Record nothing."""

    hooks = ("start", "stop", "step", "accepted", "first_token", "finished")
    return SimpleNamespace(**dict.fromkeys(hooks, note))


class _Responder:
    """Encodes its input as a real responder would, and discards it."""

    sent = 0
    trace_context: str | None = None

    def __init__(self) -> None:
        self.ended = threading.Event()

    def send(self, text: str, meta: Meta, *, final: bool) -> None:
        text.encode()
        encode_meta(meta)
        _Responder.sent += 1
        if final:
            self.ended.set()

    def send_frame(self, frame: Frame) -> None:
        encode_frame(frame)
        _Responder.sent += 1

    def refuse(self, code: RefusalCode, message: str) -> None:
        if code is not RefusalCode.SHUTTING_DOWN:
            raise RuntimeError(message)

    def cancelled(self) -> bool:
        return False


class _SleepingEngine:
    """Gives every open request a token per step, which only sleeps; has what the service calls."""

    def __init__(self, vocabulary: int, new_tokens: int) -> None:
        self.settings = EngineSettings(max_running=1024, max_batched_tokens=1024)
        self.max_context = 100_000
        self.started = threading.Event()
        self.making_s = 0.0
        """CPU time in seconds spent on creating outputs, which is not part of delivery."""
        self._vocabulary = vocabulary
        self._new_tokens = new_tokens
        self._open: dict[str, int] = {}
        self._outputs: list[TokenOutput] = []

    def add(self, request: EngineRequest) -> None:
        self._open[request.request_id] = 0

    def cancel(self, request_id: str) -> bool:
        return self._open.pop(request_id, None) is not None

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._open), waiting=0, kv_blocks_used=0, kv_blocks=0, preemptions=0, failed_steps=0
        )

    def step(self) -> StepStats | None:
        if not self._open or not self.started.is_set():
            time.sleep(_STEP_S)
            return None
        time.sleep(_STEP_S)
        began = time.thread_time()
        batch = list(self._open)
        for number, request_id in enumerate(batch):
            self._outputs.append(self._output(number, request_id))
        self.making_s += time.thread_time() - began
        return StepStats(batch_size=len(batch), prefill_tokens=0, decode_tokens=len(batch), seconds=_STEP_S)

    def _output(self, number: int, request_id: str) -> TokenOutput:
        self._open[request_id] += 1
        count = self._open[request_id]
        last = count == self._new_tokens
        if last:
            del self._open[request_id]
        return TokenOutput(
            request_id=request_id,
            prompt_tokens=1,
            token_id=_FIRST_PIECE + (31 * number + 7 * count) % (self._vocabulary - 2 * _FIRST_PIECE),
            finish_reason=FinishReason.LENGTH if last else None,
        )

    def take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_running(self, error: str) -> None:
        raise RuntimeError(error)

    def shut_down(self, _reason: FinishReason, _error: str) -> None:
        self._open.clear()
