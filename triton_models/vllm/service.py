"""Requests on their way through the engine: one event loop for vLLM, and one thread that talks to Triton.

A request is a task of the loop. It waits while a response of it is being sent, and what the engine yields
meanwhile becomes one response (vLLM joins it). So responses are as fine as Triton can take them, and never
pile up. The sender thread alone sends, and asks Triton in between which clients have left.
"""

import asyncio
import contextlib
import enum
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from triton_models.errors import EngineStoppedError, InvalidRequestError
from triton_models.serving.outbox import Refusal, error_response
from triton_models.serving.worker import Worker
from triton_models.vllm.tensors import (
    EmbeddingRequest,
    Progress,
    TextRequest,
    Values,
    embedding_outputs,
    read_request,
)
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)

POLL_PERIOD_S: Final = 0.2
"""How often Triton is asked about each open request, which takes some 50 microseconds."""

_DTYPES: Final = {
    "cumulative_logprob": np.float32,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
}
"""Of the outputs that are not strings."""

Outputs = dict[str, list[Any]]


class Engine(Protocol):
    """What is needed of `engine.Engine`, whose methods say more."""

    @property
    def dead(self) -> bool:
        """Whether it answers nothing any more."""
        ...

    def generate(self, request: TextRequest) -> AsyncGenerator[tuple[Any, int], None]:
        """Yield outputs and the number of choices."""
        ...

    async def embed(self, request: EmbeddingRequest) -> tuple[list[float], int]:
        """Return an embedding and the number of the prompt's tokens."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Ending(enum.Enum):
    """Why a task is cancelled."""

    CLIENT_LEFT = RefusalCode.CANCELLED, "the request was cancelled"
    UNLOADED = RefusalCode.SHUTTING_DOWN, "the model is being unloaded"
    UNSENT = RefusalCode.INTERNAL, "a response could not be sent"


@dataclass(slots=True, eq=False)
class Call:
    """An open request.

    Attributes:
        sender: Triton's response sender. The request itself would keep its inputs in shared memory.
        task: what answers it.
        ending: why it is being ended early.
        closed: whether the final response was sent: Triton must not be asked about it after that. Only the
            sender thread uses it.
    """

    sender: Any
    task: "asyncio.Task[None] | None" = None
    ending: Ending | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as `execute` read it: the values of its tensors, and its own parameters, a JSON object."""

    call: Call
    values: Values | None
    """None: they could not be read."""
    parameters: str = ""


@dataclass(slots=True)
class _Posted:
    call: Call
    outputs: Outputs | Refusal
    final: bool
    sent: asyncio.Future[None] = field(repr=False)


class Service:
    """Answers requests until it is closed.

    Args:
        start: starts the engine, on the thread of its event loop.
        pb_utils: Triton's module.
        died: called once, when a request found the engine dead.
    """

    def __init__(self, start: Callable[[], Engine], pb_utils: Any, died: Callable[[], object]) -> None:
        self._pb_utils = pb_utils
        self._died = died
        self._told_death = False
        self._open: set[Call] = set()
        """Changed on the loop's thread."""
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._sender = Worker[_Posted]("sender", self._send_waiting, idle=self._poll, idle_s=POLL_PERIOD_S)
        self._polled_at = 0.0
        self._thread.start()
        self._sender.start()
        try:
            self._engine = self.run(_called(start))
        except BaseException:
            self._stop()
            raise

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(self, arrivals: Sequence[Arrival]) -> None:
        """Answer requests. Never waits."""
        self._loop.call_soon_threadsafe(self._begin, arrivals)

    def close(self) -> None:
        """Answer every open request, end the engine and the threads."""
        self.run(self._end_all())
        self.run(_called(self._engine.close))
        self._stop()

    def _stop(self) -> None:
        self._sender.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        await asyncio.sleep(0)  # a task that has not begun yet would be cancelled without its answer
        calls = list(self._open)
        for call in calls:
            self._cancel(call, Ending.UNLOADED)
        await asyncio.gather(*(call.task for call in calls if call.task), return_exceptions=True)

    def _begin(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            arrival.call.task = self._loop.create_task(self._serve(arrival))
            self._open.add(arrival.call)  # last: cancelled before it begins, a task would not answer

    def _cancel(self, call: Call, ending: Ending) -> None:
        if call.ending is None and call.task is not None:
            call.ending = ending
            call.task.cancel()

    async def _serve(self, arrival: Arrival) -> None:
        """Answer one request. Whatever fails in it is its own."""
        call = arrival.call
        try:
            try:
                await self._answer(arrival)
            except asyncio.CancelledError:
                await self._send(call, (call.ending or Ending.UNLOADED).value, final=True)
            except Exception as error:  # noqa: BLE001 - the client is told; `_refusal` logs what is not its own
                await self._send(call, self._refusal(error), final=True)
        finally:
            self._open.discard(call)

    async def _answer(self, arrival: Arrival) -> None:
        if arrival.values is None:
            raise InvalidRequestError("the input tensors cannot be read")
        if empty := [name for name, values in arrival.values.items() if not values and name != "image"]:
            raise InvalidRequestError(f"{empty[0]} is empty")
        request = read_request(arrival.values, arrival.parameters)
        if isinstance(request, EmbeddingRequest):
            values, count = await self._engine.embed(request)
            await self._send(arrival.call, embedding_outputs(request, values, count), final=True)
            return
        progress: Progress | None = None
        finished = False
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output, choices in outputs:
                progress = progress or Progress(request, choices)
                if any(choice.finish_reason == "error" for choice in output.outputs):
                    raise RuntimeError("the engine failed in this request")
                finished = bool(output.finished)
                await self._send(arrival.call, progress.outputs(output), final=finished)
        if not finished:
            raise RuntimeError("the engine ended an answer without saying so")

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, InvalidRequestError):
            return RefusalCode.INVALID_REQUEST, str(error)
        if isinstance(error, EngineStoppedError) or self._engine.dead:
            if not self._told_death:
                self._told_death = True
                log.error("the engine has died", exc_info=error)
                self._died()
            return RefusalCode.UNAVAILABLE, "vLLM's engine has died"
        log.error("a request failed", exc_info=error)
        return RefusalCode.INTERNAL, "the request failed"

    async def _send(self, call: Call, outputs: Outputs | Refusal, *, final: bool) -> None:
        """Have a response sent, and wait until it is."""
        posted = _Posted(call, outputs, final, self._loop.create_future())
        self._sender.put(posted)
        await posted.sent

    # What follows runs on the sender thread.

    def _send_waiting(self, first: _Posted) -> None:
        """Send everything that waits; the loop then goes on with all of it at once."""
        batch = [first, *self._sender.take_rest()]
        failed = []
        for posted in batch:
            call = posted.call
            if call.closed:
                continue
            try:
                self._respond(posted)
            except Exception:
                # Confined to one call: the thread serves the others too.
                log.exception("a response could not be sent")
                failed.append(call)
        self._loop.call_soon_threadsafe(self._release, batch, failed)
        if time.monotonic() - self._polled_at >= POLL_PERIOD_S:
            self._poll()

    def _respond(self, posted: _Posted) -> None:
        utils, call = self._pb_utils, posted.call
        if isinstance(posted.outputs, tuple):
            response = error_response(utils, *posted.outputs)
        else:
            response = utils.InferenceResponse(
                output_tensors=[
                    utils.Tensor(name, np.array(values, dtype=_DTYPES.get(name, np.object_)))
                    for name, values in posted.outputs.items()
                ]
            )
        call.closed = posted.final
        call.sender.send(response, flags=utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if posted.final else 0)

    def _poll(self) -> None:
        """Ask Triton which clients have left."""
        self._polled_at = time.monotonic()
        for call in list(self._open):
            if call.closed or call.ending is not None:
                continue
            try:
                left = call.sender.is_cancelled()
            except Exception:
                log.exception("whether a client has left cannot be told")
                left = True
            if left:
                self._loop.call_soon_threadsafe(self._cancel, call, Ending.CLIENT_LEFT)

    # And this on the loop's.

    def _release(self, batch: list[_Posted], failed: list[Call]) -> None:
        for posted in batch:
            if not posted.sent.done():
                posted.sent.set_result(None)
        for call in failed:
            self._cancel(call, Ending.UNSENT)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return what vLLM's own server runs on, where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - an option
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _called(function: Callable[[], Any]) -> Any:
    return function()
