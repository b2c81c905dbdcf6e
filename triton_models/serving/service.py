"""A model's work, without Triton: to take, queue, deliver and cancel requests."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from triton_models.engine.engine import Engine, EngineStats
from triton_models.engine.loop import EngineLoop
from triton_models.engine.sequence import FinishReason, check_length, says_context
from triton_models.errors import (
    EngineStoppedError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)
from triton_models.serving.channel import Delivery, DeltaChannel
from triton_models.serving.chat_text import ChatText
from triton_models.serving.engine_requests import (
    TokenLimits,
    engine_requests,
    going_on,
    kept_prompt,
    new_tokens,
)
from triton_models.serving.intake import Arrival, Inputs, Intake
from triton_models.serving.outbox import Call, Sender, refusal
from triton_models.serving.report import EngineMetrics
from triton_models.serving.request import Choice, OpenRequest, PromptReport
from triton_models.serving.worker import Worker
from wire.history import decode_history
from wire.meta import Accepted, Meta, ProbeReport
from wire.refusal import RefusalCode
from wire.request import (
    Cancel,
    Detokenize,
    Generation,
    OpenChannel,
    Probe,
    Request,
    Tokenize,
    TokenizerFiles,
    decode_request,
    request_kind,
)

if TYPE_CHECKING:
    from triton_models.serving.spans import ModelSpans, OnEnd

log = logging.getLogger(__name__)

MAX_BYTES_PER_TOKEN: Final = 128
"""More than the longest piece of any vocabulary: a longer prompt is refused without tokenizing it."""

HEARTBEAT_S: Final = 2.0
"""Longest silence of a running request, unless the option says otherwise."""

TEXTS_WAITING: Final = 64
"""Requests that may wait to be tokenized. One is handled at a time, so the wait is at most about a second,
unless texts are very long."""

LONGEST_WAIT_MS: Final = 60_000
"""How long a request may wait to be tokenized, unless its own deadline is earlier."""

FILES_PART: Final = 2**20
"""Bytes of the tokenizer's files in a response: several of them pass through the memory shared with Triton,
which in a container may have 64 MiB."""


_TEXT_KINDS: Final = {"tokenize", "detokenize"}


class Service:
    """Serves all kinds of requests with one engine.

    Args:
        engine: not running yet.
        text: the model's tokenizer and chat format.
        metrics: not started yet.
        vocabulary: number of ids that the model has.
        heartbeat_s: longest silence of a running request.
        spans: sends spans of the requests that are traced.
    """

    def __init__(
        self,
        engine: Engine,
        text: ChatText,
        metrics: EngineMetrics,
        *,
        vocabulary: int,
        heartbeat_s: float = HEARTBEAT_S,
        spans: "ModelSpans | None" = None,
    ) -> None:
        settings = engine.settings
        self._text = text
        self._metrics = metrics
        self._vocabulary = vocabulary
        self._spans = spans
        self._max_context = engine.max_context
        # The engine limits its own queue exactly; this only keeps requests from piling up in front of it.
        self._max_open = 2 * (settings.max_running + settings.max_waiting)
        self._requests: dict[str, OpenRequest] = {}
        self._begun = 0
        self._choices: dict[str, tuple[OpenRequest, Choice]] = {}
        """The choices that the engine may still be working on, by their keys."""
        self._on_end: dict[str, OnEnd] = {}
        """What creates the spans of a traced request at its end."""
        self._keys = itertools.count()
        self._closing = threading.Event()
        self._sender = Sender(heartbeat_s=heartbeat_s)
        self._delivery = Delivery(
            self._choices.get,
            self._sender,
            on_first_token=metrics.first_token,
            on_lost=lambda channel: self._cancel_where(lambda each: each.channel is channel),
            heartbeat_s=heartbeat_s,
        )
        self._loop = EngineLoop(engine, on_outputs=self._delivery.worker.put, on_step=metrics.step)
        self._intake = Intake(self._take, self._prepare, text.compile_grammar)
        self._tokenizing = Worker[Callable[[], None]]("tokenizing", lambda answer: answer())
        ways = (self._tokenizing, self._delivery.worker, self._sender.worker)
        self._workers = (*self._intake.workers, *ways)

    def start(self) -> None:
        """Start every thread."""
        self._loop.start()
        for worker in self._workers:
            worker.start()
        self._metrics.start(self)

    def close(self) -> None:
        """Refuse every request that still waits or runs, so that all are answered, and join every thread."""
        self._closing.set()
        self._intake.close()
        self._tokenizing.stop()
        self._loop.stop()
        self._delivery.stop()
        self._sender.stop()
        self._metrics.stop()
        if self._spans is not None:
            self._spans.close()

    def submit(self, batch: Sequence[Arrival]) -> None:
        """Take requests; their responses follow through their responders, from other threads. Never waits."""
        self._intake.submit(batch)

    @property
    def heartbeat(self) -> float:
        """When requests could last get in, steps run and tokens leave, in monotonic seconds.

        It grows old if a thread on this way has ended or is stuck, also in a response that Triton does not
        take.
        """
        now = time.monotonic()
        return min(self._loop.heartbeat, now - max(worker.age(now) for worker in self._workers))

    def stats(self) -> EngineStats:
        """Return the engine's current counts."""
        return self._loop.stats()

    def cancel(self, request: OpenRequest) -> None:
        """End a request before the engine's next step."""
        request.cancelled = True
        self._intake.give_up(request)
        for choice in request.choices:
            self._loop.cancel(choice.key)

    def choice_closed(self, choice: Choice) -> None:
        """Forget a choice whose last response was sent."""
        if self._choices.pop(choice.key, None) is None:
            return  # it never got into the engine
        # After a stop string, a failed delivery or another choice's error, the engine still computes it.
        self._loop.cancel(choice.key)
        reason = choice.finish or FinishReason.CANCELLED
        self._metrics.finished(reason, choice.completion_tokens - choice.resumed_tokens, choice.cached_tokens)

    def request_closed(self, request: OpenRequest, code: RefusalCode | None) -> None:
        """Forget a request whose final response was sent, wherever it stood."""
        self._requests.pop(request.key, None)
        for choice in request.choices:
            self.choice_closed(choice)
        if request.channel is not None:
            request.channel.detach(request.streams, request.key)
        if (on_end := self._on_end.pop(request.key, None)) is not None:
            on_end(request, code)

    def _take(self, arrival: Arrival) -> None:
        """Answer one request or begin to prepare it; on the intake's thread."""
        call = Call("request", arrival.responder)
        try:
            request, inputs = self._read(arrival)
            match request:
                case Generation():
                    call = opened = OpenRequest(
                        f"{next(self._keys)}", request, inputs, arrival.responder, self
                    )
                    self._open(opened)
                case Tokenize() | Detokenize():
                    limit_ms = min(LONGEST_WAIT_MS, request.deadline_ms or LONGEST_WAIT_MS)
                    call = Call("tokenize", arrival.responder, deadline_ms=limit_ms)
                    self._tokenizing.put(partial(self._tokenize, call, request, inputs))
                    self._sender.watch(call)
                case TokenizerFiles():
                    self._send_files(call)
                case OpenChannel():
                    call = channel = DeltaChannel(
                        request.open_channel, arrival.responder, self._delivery.close
                    )
                    self._delivery.open(channel)
                    self._sender.watch(channel)
                case Cancel():
                    found = self._cancel_where(lambda each: each.generation.request_id == request.cancel)
                    self._sender.post(call, partial(call.send, "", Meta(cancelled=found), final=True))
                case Probe() if not self._loop.alive:
                    # A report would look healthy; a refusal makes whoever monitors the model reload it.
                    self._sender.refuse(call, RefusalCode.UNAVAILABLE, "the engine has stopped")
                case Probe():
                    self._sender.post(call, partial(call.send, "", Meta(probe=self._report()), final=True))
        except Exception as error:  # noqa: BLE001 - confined to one request: only its client is told
            self._sender.refuse(call, *refusal(error))

    def _read(self, arrival: Arrival) -> tuple[Request, Inputs]:
        self._check_open()
        if arrival.inputs is None:
            raise InvalidRequestError("every input holds exactly one string")
        document = arrival.inputs.sampling
        try:
            # Before the rest is read, which for a million ids takes as long as several steps.
            if request_kind(document) in _TEXT_KINDS and self._tokenizing.waiting >= TEXTS_WAITING:
                raise QueueFullError(f"{self._tokenizing.waiting} requests wait to be tokenized already")
            return decode_request(document), arrival.inputs
        except ValueError as error:  # msgspec's errors, and bytes that are not UTF-8
            raise InvalidRequestError(f"sampling: {error}") from error

    def _open(self, request: OpenRequest) -> None:
        """Register a generation and have it prepared. Whatever fails from here on, its end unregisters it."""
        context = request.responder.trace_context
        if self._spans is not None and (on_end := self._spans.begin(context)) is not None:
            self._on_end[request.key] = on_end
        if len(self._requests) >= self._max_open:
            raise QueueFullError(f"{len(self._requests)} requests are open already")
        self._requests[request.key] = request
        self._begun += 1
        self._sender.watch(request)
        self._intake.begin(request)

    def _prepare(self, request: OpenRequest) -> None:
        """Queue one request in the engine, or refuse it; on the preparing thread."""
        try:
            if (given_up := request.given_up()) is not None:
                self._sender.refuse(request, *given_up)
                return
            accepted = self._admit(request)
            self._sender.post(request, partial(self._accept, request, accepted))
        except Exception as error:  # noqa: BLE001 - confined to one request: only its client is told
            self._sender.refuse(request, *refusal(error))
        finally:
            request.inputs = request.compiling = None
        if request.cancelled:
            self.cancel(request)  # it may have been cancelled before the engine had it

    def _admit(self, request: OpenRequest) -> Accepted:
        """Render, tokenize, check and queue a request. Frames of a delta channel may overtake `accepted`."""
        self._check_open()
        generation, inputs, compiling = request.generation, request.inputs, request.compiling
        if inputs is None:
            raise RuntimeError("a request is prepared only once")
        if compiling is not None and (error := compiling.exception()) is not None:
            # Its traceback would refer to the request that waits for it.
            raise error.with_traceback(None) from None
        full_ids = self._prompt_ids(generation, inputs)
        prompt_ids = kept_prompt(generation, full_ids, self._max_context)
        if len(prompt_ids) < len(full_ids) and generation.echo and generation.raw:
            generation = replace(generation, prompt_token_ids=prompt_ids)  # only their text is echoed
        request.prompt_tokens = len(prompt_ids)
        # As the engine does, but before anything is made of the prompt for each choice.
        check_length(len(prompt_ids), self._max_context)
        if generation.channel is not None:
            channel = self._delivery.find(generation.channel.id)
            first = generation.channel.stream
            streams = range(first, first + generation.n)
            # First, so that whoever loses the channel finds the request.
            request.channel, request.streams = channel, streams
            channel.attach(streams, request.key)
        request.choices = [
            self._choice(f"{request.key}.{index}", index, generation, inputs, prompt_ids, generated=generated)
            for index, generated in going_on(generation)
        ]
        queued = engine_requests(
            generation,
            {choice.index: choice.key for choice in request.choices},
            prompt_ids,
            max_tokens=new_tokens(generation, len(prompt_ids), self._max_context),
            stop_ids=self._text.stop_ids(generation),
            deadline=request.deadline,
            grammar=None if compiling is None else compiling.result(),
            limits=TokenLimits.of(generation, self._text.tokenizer, self._vocabulary),
        )
        self._choices.update((choice.key, (request, choice)) for choice in request.choices)
        try:
            self._loop.add(*queued)
        except Exception:
            for choice in request.choices:
                del self._choices[choice.key]  # it does not count as one that has ended
            raise
        request.queued = time.monotonic()
        return Accepted(
            request_id=generation.request_id or request.key,
            prompt_tokens=len(prompt_ids),
            prompt_token_ids=prompt_ids if generation.return_token_ids else None,
        )

    def _accept(self, request: OpenRequest, accepted: Accepted) -> None:
        if request.closed:  # it ended while it was prepared, when nothing but itself could be forgotten
            self.request_closed(request, None)
            return
        request.accept(accepted)
        self._metrics.accepted(accepted.prompt_tokens * request.generation.n)

    def _choice(
        self,
        key: str,
        index: int,
        generation: Generation,
        inputs: Inputs,
        prompt_ids: list[int],
        *,
        generated: list[int],
    ) -> Choice:
        text = self._text
        stream = text.answer(generation)
        choice = Choice(
            key,
            index,
            generation,
            text.tokenizer,
            stream,
            echo=text.echo(generation, inputs.prompt.decode(), prompt_ids, stream),
            report=None
            if generation.prompt_logprobs is None
            else PromptReport(generation, text.tokenizer, prompt_ids),
        )
        if generated:
            choice.go_on(generated)
        return choice

    def _prompt_ids(self, generation: Generation, inputs: Inputs) -> list[int]:
        size = len(inputs.prompt) + len(inputs.history)
        if generation.truncate_prompt_tokens is None and size > self._max_context * MAX_BYTES_PER_TOKEN:
            raise PromptTooLongError(
                f"{says_context(self._max_context)} However, the prompt has {size} bytes, too many for that."
            )
        prompt, history = inputs.prompt.decode(), decode_history(inputs.history)
        if generation.prompt_token_ids is not None and (prompt or history):
            raise ModelError("prompt_token_ids excludes prompt and history")
        return self._text.prompt_ids(generation, prompt, history)

    def _tokenize(self, call: Call, request: Tokenize | Detokenize, inputs: Inputs) -> None:
        """Answer a request to tokenize; on the thread for that."""
        try:
            if (given_up := call.given_up()) is not None:
                self._sender.refuse(call, *given_up)
                return
            self._check_open()
            text = ""
            if isinstance(request, Detokenize):
                text, tokenized = self._text.detokenize(request, self._vocabulary)
            else:
                history = decode_history(inputs.history)
                tokenized = self._text.tokenize(request, inputs.prompt.decode(), history)
            self._sender.post(call, partial(call.send, text, Meta(tokenized=tokenized), final=True))
        except Exception as error:  # noqa: BLE001 - confined to one request: only its client is told
            self._sender.refuse(call, *refusal(error))

    def _send_files(self, call: Call) -> None:
        """Send the tokenizer's files, in parts of `FILES_PART`.

        Raises:
            InvalidRequestError: the model's conversations are written here.
        """
        archive = self._text.archive
        if not archive:
            raise InvalidRequestError(f"tokenizer_files: the format {self._text.format.name!r} needs none")
        for at in range(0, len(archive), FILES_PART):
            part, final = archive[at : at + FILES_PART], at + FILES_PART >= len(archive)
            self._sender.post(call, partial(call.send, part, Meta(), final=final))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineStoppedError("the model is being unloaded")

    def _cancel_where(self, chosen: Callable[[OpenRequest], bool]) -> bool:
        """Cancel the open requests that are `chosen`; False if none is."""
        found = [request for request in list(self._requests.values()) if chosen(request)]
        for request in found:
            self.cancel(request)
        return bool(found)

    def _report(self) -> ProbeReport:
        stats = self._loop.stats()
        return ProbeReport(
            heartbeat_age_s=round(time.monotonic() - self.heartbeat, 3),
            running=stats.running,
            waiting=stats.waiting,
            begun=self._begun,
            kv_usage=round(stats.kv_blocks_used / stats.kv_blocks, 4),
            format=self._text.format.name,
            max_context=self._max_context,
            resumes=True,
            vocabulary=self._vocabulary,
        )
