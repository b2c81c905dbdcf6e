"""A stream entry's work, without Triton: validate, queue, deliver and cancel requests, and report."""

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from triton_models.engine.engine import Engine
from triton_models.engine.loop import EngineLoop
from triton_models.engine.sequence import FinishReason
from triton_models.errors import (
    EngineStoppedError,
    ModelError,
    PromptTooLongError,
)
from triton_models.serving.answer import Answer
from triton_models.serving.channel import Channels, DeltaChannel
from triton_models.serving.chat_text import ChatText
from triton_models.serving.choice import Choice
from triton_models.serving.delivery import Delivery
from triton_models.serving.engine_requests import engine_requests, new_tokens
from triton_models.serving.inputs import Inputs
from triton_models.serving.logprobs import PromptReport
from triton_models.serving.metrics import EngineMetrics
from triton_models.serving.monitor import Monitor
from triton_models.serving.open_request import OpenRequest, Phase
from triton_models.serving.preparing import Compiled, Preparing
from triton_models.serving.process import process_name
from triton_models.serving.refusals import refusal
from triton_models.serving.responder import Responder
from triton_models.serving.steps import StepDelivery
from wire.history import decode_history
from wire.meta import Accepted, Meta, ProbeReport
from wire.refusal import RefusalCode
from wire.sampling import Cancel, Generation, OpenChannel, Probe, decode_sampling

if TYPE_CHECKING:
    from triton_models.serving.spans import ModelSpans

log = logging.getLogger(__name__)

MAX_BYTES_PER_TOKEN = 128
"""More than the longest piece of any vocabulary: a longer prompt is refused without tokenizing it."""


class StreamService:
    """Serves generations, delta channels, cancels and probes of one engine.

    `handle` never waits, so cancels, probes and channels are served however full the engine is.
    """

    def __init__(
        self,
        engine: Engine,
        text: ChatText,
        metrics: EngineMetrics,
        *,
        heartbeat_s: float,
        spans: "ModelSpans | None" = None,
    ) -> None:
        settings = engine.settings
        self._spans = spans
        self._text = text
        self._metrics = metrics
        self._max_context = engine.max_context
        # The engine limits its own queue exactly; this only keeps requests from piling up in front of it.
        self._max_open = 2 * (settings.max_running + settings.max_waiting)
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[str, tuple[OpenRequest, Choice]] = {}
        """The choices that the engine may still be working on, by their keys."""
        self._keys = itertools.count()
        self._process = process_name()
        self._closing = threading.Event()
        self._channels = Channels()
        self._delivery = StepDelivery(
            self._choices.get,
            Delivery(on_end=self._on_end),
            on_first_token=metrics.first_token,
            on_lost=self._lose,
        )
        self._loop = EngineLoop(engine, on_outputs=self._delivery.post, on_step=metrics.step)
        self._preparing = Preparing(text.compile_grammar, self._prepare)
        self._monitor = Monitor(self._streams, self._on_gone, heartbeat_s)

    def start(self) -> None:
        """Start every thread."""
        self._loop.start()
        self._delivery.start()
        self._monitor.start()
        self._metrics.start(self._loop)

    def close(self) -> None:
        """Refuse every request that still waits or runs, so that all are answered, and join every thread."""
        self._closing.set()
        self._preparing.close()
        self._loop.stop()
        self._delivery.stop()
        self._monitor.stop()
        for channel in self._channels.all():
            channel.end(RefusalCode.SHUTTING_DOWN, "the model is being unloaded")
        self._metrics.stop()
        if self._spans is not None:
            self._spans.close()

    def handle(self, responder: Responder, inputs: Inputs) -> None:
        """Accept one request; its responses follow through `responder`, from other threads."""
        try:
            sampling = decode_sampling(inputs.sampling)
        except msgspec.MsgspecError as error:
            responder.refuse(RefusalCode.INVALID_REQUEST, f"sampling: {error}")
            return
        match sampling:
            case Probe() if not self._loop.alive:
                # A report would look healthy; a refusal makes whoever monitors the model reload it.
                responder.refuse(RefusalCode.INTERNAL, "the engine has stopped")
            case Probe():
                responder.send("", Meta(probe=self._report()), final=True)
            case Cancel():
                responder.send("", Meta(cancelled=self._cancel_by_id(sampling.cancel)), final=True)
            case OpenChannel():
                self._open_channel(sampling.open_channel, responder)
            case Generation():
                on_end = None if self._spans is None else self._spans.begin(responder.trace_context())
                self._open(OpenRequest(f"{next(self._keys)}", sampling, responder, on_end), inputs)

    def _open(self, request: OpenRequest, inputs: Inputs) -> None:
        if self._closing.is_set():
            refused = RefusalCode.SHUTTING_DOWN, "the model is being unloaded"
        elif len(self._requests) >= self._max_open:
            refused = RefusalCode.QUEUE_FULL, f"{len(self._requests)} requests are open already"
        else:
            self._requests[request.key] = request
            try:
                self._preparing.submit(request, inputs)
            except ModelError as error:
                refused = refusal(error)
                del self._requests[request.key]
            else:
                return
        with request.lock:
            request.refuse(*refused)

    def _open_channel(self, channel_id: str, responder: Responder) -> None:
        try:
            if self._closing.is_set():
                raise EngineStoppedError("the model is being unloaded")
            self._channels.open(channel_id, responder)
        except ModelError as error:
            responder.refuse(*refusal(error))

    def _lose(self, channel: DeltaChannel) -> None:
        """Close a channel whose client is gone, and cancel its generations, which report it as lost."""
        self._channels.remove(channel)
        channel.end(RefusalCode.CANCELLED, "the channel was closed")
        for key in channel.requests:
            if (request := self._requests.get(key)) is not None:
                self._cancel(request)

    def _prepare(self, request: OpenRequest, inputs: Inputs, compiled: Compiled | None) -> None:
        """Queue one request in the engine, or refuse it; runs on the intake thread."""
        with request.lock:
            try:
                self._admit(request, inputs, compiled)
            except Exception as error:  # noqa: BLE001 - confined to one request: only its client is told
                request.refuse(*refusal(error))
            refused = request.phase is Phase.CLOSED
        if refused:
            self._requests.pop(request.key, None)
            request.detach()
        for choice in request.choices if refused or request.cancelled else ():
            # The engine may have the choice: sending `accepted` failed, or a cancel came just before.
            self._loop.cancel(choice.key)
            if refused:
                self._choices.pop(choice.key, None)

    def _admit(self, request: OpenRequest, inputs: Inputs, compiled: Compiled | None) -> None:
        """Validate, tokenize, queue, accept. The caller holds the lock, so no response overtakes `accepted`.

        Frames of a delta channel may overtake `accepted`: outputs go there as soon as the request is queued.
        """
        generation = request.generation
        if (given_up := request.given_up()) is not None:
            request.refuse(*given_up)
            return
        if self._closing.is_set():
            raise EngineStoppedError("the model is being unloaded")
        grammar = None if compiled is None else compiled.result()
        prompt_ids = self._prompt_ids(generation, inputs)
        if generation.channel is not None:
            first = generation.channel.stream
            request.attach(self._channels.find(generation.channel.id), range(first, first + generation.n))
        choices = [self._choice(request, index, inputs, prompt_ids) for index in range(generation.n)]
        request.expect(choices, len(prompt_ids))
        asked = engine_requests(
            generation,
            [choice.key for choice in request.choices],
            prompt_ids,
            max_tokens=new_tokens(generation, len(prompt_ids), self._max_context),
            stop_ids=self._text.stop_ids(generation),
            deadline=request.deadline,
            grammar=grammar,
        )
        self._choices.update((choice.key, (request, choice)) for choice in request.choices)
        self._loop.add(*asked)
        request.queued = time.monotonic()
        request.accept(
            Accepted(
                request_id=generation.request_id or request.key,
                prompt_tokens=len(prompt_ids),
                prompt_token_ids=prompt_ids if generation.return_token_ids else None,
                process=self._process if generation.quiet else None,
            )
        )
        self._metrics.accepted(len(prompt_ids) * generation.n)

    def _choice(self, request: OpenRequest, index: int, inputs: Inputs, prompt_ids: list[int]) -> Choice:
        generation, text = request.generation, self._text
        stream = text.answer(generation)
        echo = text.echo(generation, inputs.prompt.decode(), prompt_ids, stream)
        report = PromptReport.asked(generation, text.tokenizer, prompt_ids)
        answer = Answer(generation, text.tokenizer, stream, index, echo, prompt=report)
        return Choice(f"{request.key}.{index}", index, answer)

    def _prompt_ids(self, generation: Generation, inputs: Inputs) -> list[int]:
        size = len(inputs.prompt) + len(inputs.history)
        if size > self._max_context * MAX_BYTES_PER_TOKEN:
            raise PromptTooLongError(
                f"a prompt of {size} bytes cannot fit the context of {self._max_context} tokens"
            )
        prompt, history = inputs.prompt.decode(), decode_history(inputs.history)
        if generation.prompt_token_ids is not None and (prompt or history):
            raise ModelError("prompt_token_ids excludes prompt and history")
        return self._text.prompt_ids(generation, prompt, history)

    def _on_end(self, request: OpenRequest, choice: Choice) -> None:
        """Forget a choice whose last response was sent, or a request that has ended; on a sender thread."""
        if request.phase is not Phase.CLOSED:
            self._forget(choice)
            return
        for each in request.choices:
            self._forget(each)
        self._requests.pop(request.key, None)
        request.detach()

    def _forget(self, choice: Choice) -> None:
        if self._choices.pop(choice.key, None) is None:
            return  # Another sender thread was first.
        # After a stop string, a failed delivery or another choice's error, the engine still computes it.
        self._loop.cancel(choice.key)
        answer = choice.answer
        reason = answer.finish or FinishReason.CANCELLED
        self._metrics.finished(reason, answer.completion_tokens, answer.cached_tokens)

    def _open_requests(self) -> list[OpenRequest]:
        return list(self._requests.values())

    def _streams(self) -> list[OpenRequest | DeltaChannel]:
        return [*self._requests.values(), *self._channels.all()]

    def _on_gone(self, stream: OpenRequest | DeltaChannel) -> None:
        """Handle a client's hang-up; runs on the monitor's thread."""
        if isinstance(stream, DeltaChannel):
            self._lose(stream)
        else:
            self._cancel(stream)

    def _cancel(self, request: OpenRequest) -> None:
        request.cancelled = True
        self._preparing.give_up(request)
        for choice in request.choices:
            self._loop.cancel(choice.key)

    def _cancel_by_id(self, request_id: str) -> bool:
        found = [each for each in self._open_requests() if each.generation.request_id == request_id]
        for request in found:
            self._cancel(request)
        return bool(found)

    def _report(self) -> ProbeReport:
        stats = self._loop.stats()
        now = time.monotonic()
        # A response that Triton does not take blocks the thread that sends it; soon all would be blocked.
        stuck_s = max((stream.sending_s(now) for stream in self._streams()), default=0.0)
        return ProbeReport(
            heartbeat_age_s=round(max(now - self._loop.heartbeat, stuck_s), 3),
            running=stats.running,
            waiting=stats.waiting,
            format=self._text.format.name,
            max_context=self._max_context,
            delta_channel=True,
        )
