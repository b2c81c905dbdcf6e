"""Requests on their way through the engine: one event loop for vLLM, and one thread that talks to Triton.

A request is a task of the loop. It waits while a response of it is being sent, and what the engine yields
meanwhile becomes one response (vLLM joins it). So responses are as fine as Triton can take them, and never
pile up.
"""

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triton_models.errors import EngineStoppedError, InvalidRequestError
from triton_models.serving import outbox
from triton_models.serving.outbox import CANCELLED, UNLOADED, Refusal, Sender
from triton_models.vllm.tensors import EmbeddingRequest, Progress, Values, embedding_outputs, read_request
from wire.refusal import RefusalCode

if TYPE_CHECKING:
    from triton_models.vllm.engine import Engine

log = logging.getLogger(__name__)

_DTYPES: Final = {
    "cumulative_logprob": np.float32,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
}
"""Of the outputs that are not strings."""

Outputs = dict[str, list[Any]]


class Call(outbox.Call):
    """An open request; `task` answers it."""

    task: "asyncio.Task[None]"

    def gone(self) -> None:
        """Note that the client has left, and have the task end."""
        super().gone()
        self.task.get_loop().call_soon_threadsafe(_cancel, self.task)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as `execute` read it: the values of its tensors, and its own parameters, a JSON object."""

    call: Call
    values: Values | None
    """None: they could not be read."""
    parameters: str = ""


_Posted = tuple[Call, partial[None], asyncio.Future[None]]
"""A response: the call it is for, what sends it, and what waits for it."""


class Service:
    """Answers requests until it is closed.

    Args:
        start: starts the engine, on the thread of its event loop.
        died: called once, when a request found the engine dead.
    """

    def __init__(self, start: "Callable[[], Engine]", died: Callable[[], object]) -> None:
        self._died = died
        self._told_death = False
        self._open: set[asyncio.Task[None]] = set()
        """Changed on the loop's thread."""
        self._batch: list[_Posted] = []
        """The responses of this turn of the loop."""
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._sender = Sender(heartbeat_s=math.inf)
        self._thread.start()
        self._sender.worker.start()
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
        for task in self._open:
            _cancel(task)
        await asyncio.gather(*self._open, return_exceptions=True)

    def _begin(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            task = arrival.call.task = self._loop.create_task(self._serve(arrival))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            self._sender.watch(arrival.call)

    async def _serve(self, arrival: Arrival) -> None:
        """Answer one request. Whatever fails in it is its own."""
        call = arrival.call
        try:
            await self._answer(arrival)
        except asyncio.CancelledError:
            self._sender.refuse(call, *(CANCELLED if call.cancelled else UNLOADED))
        except Exception as error:  # noqa: BLE001 - the client is told; `_refusal` logs what is not its own
            self._sender.refuse(call, *self._refusal(error))

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

    async def _send(self, call: Call, outputs: Outputs, *, final: bool) -> None:
        """Have a response sent, with those of the same turn of the loop, and wait until they are."""
        if not self._batch:
            self._loop.call_soon(self._post_batch)
        sent = self._loop.create_future()
        self._batch.append((call, partial(_respond, call, outputs, final=final), sent))
        await sent

    def _post_batch(self) -> None:
        batch, self._batch = self._batch, []
        self._sender.post(batch[0][0], partial(self._send_batch, batch))

    def _send_batch(self, batch: Sequence[_Posted]) -> None:
        """Send responses, on the sender thread; the loop then goes on with all of them at once."""
        for call, respond, _ in batch:
            self._sender.do(call, respond)
        self._loop.call_soon_threadsafe(_resolve, [sent for *_, sent in batch])


def _respond(call: Call, outputs: Outputs, *, final: bool) -> None:
    if call.closed:
        return
    try:
        tensors = {name: np.array(each, _DTYPES.get(name, np.object_)) for name, each in outputs.items()}
        call.responder.send_tensors(tensors, final=final)
    except Exception:
        call.gone()
        raise  # the sender says so to the client
    call.closed = final


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for each in futures:
        if not each.done():
            each.set_result(None)


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task once: a second time would cut its end short."""
    if not task.cancelling():
        task.cancel()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return what vLLM's own server runs on, where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - an option
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _called(function: Callable[[], Any]) -> Any:
    return function()
