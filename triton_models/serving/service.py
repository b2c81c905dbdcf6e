"""A model's work, without Triton: to take, queue, deliver and cancel requests; and how it is built."""

import gc
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec.structs import replace

from triton_models.checkpoint import load_model, progress_bar
from triton_models.engine.engine import Engine, EngineStats
from triton_models.engine.loop import EngineLoop
from triton_models.engine.sequence import FinishReason, check_length
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.errors import (
    CheckpointError,
    EngineStoppedError,
    EntryError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)
from triton_models.options import OPTIONS, EntryParameters
from triton_models.serving.channel import Delivery, DeltaChannel
from triton_models.serving.chat_text import ChatText, load_text
from triton_models.serving.engine_requests import engine_requests, kept_prompt, new_tokens
from triton_models.serving.intake import Arrival, Compiled, Inputs, Intake, TextCall, Tokenizing
from triton_models.serving.outbox import Call, Responder, Sender, refusal
from triton_models.serving.report import EngineMetrics
from triton_models.serving.request import Choice, OpenRequest, PromptReport
from triton_models.serving.token_limits import TokenLimits
from triton_models.text.grammars import CompiledGrammar
from wire.history import decode_history
from wire.meta import Accepted, Meta, ProbeReport, Tokenized
from wire.refusal import RefusalCode
from wire.request import (
    Cancel,
    Detokenize,
    Generation,
    OpenChannel,
    Request,
    Tokenize,
    decode_request,
)

if TYPE_CHECKING:
    from triton_models.serving.spans import ModelSpans, OnEnd

log = logging.getLogger(__name__)

MAX_BYTES_PER_TOKEN: Final = 128
"""More than the longest piece of any vocabulary: a longer prompt is refused without tokenizing it."""

HEARTBEAT_S: Final = 2.0
"""Longest silence of a running request, unless the option says otherwise."""

_SWITCH_S: Final = 0.0005
"""Seconds after which a running thread must offer the interpreter lock to others; set only with a GPU."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Service:
    """Serves generations, delta channels, cancels, probes and requests to tokenize, with one engine.

    Args:
        engine: not running yet.
        text: the model's tokenizer and chat format.
        metrics: not started yet.
        vocabulary: number of ids that the model has.
        heartbeat_s: longest silence of a running request.
        spans: sends spans of the requests that are traced.
        orphaned: see `Sender`.
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
        orphaned: Callable[[], bool] = lambda: False,
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
        self._choices: dict[str, tuple[OpenRequest, Choice]] = {}
        """The choices that the engine may still be working on, by their keys."""
        self._on_end: dict[str, OnEnd] = {}
        """What creates the spans of a traced request at its end."""
        self._keys = itertools.count()
        self._closing = threading.Event()
        self._sender = Sender(heartbeat_s=heartbeat_s, orphaned=orphaned)
        self._delivery = Delivery(
            self._choices.get,
            self._sender,
            on_first_token=metrics.first_token,
            on_lost=self._cancel_all,
            heartbeat_s=heartbeat_s,
        )
        self._loop = EngineLoop(engine, on_outputs=self._delivery.post, on_step=metrics.step)
        self._intake = Intake(self._take, self._prepare, text.compile_grammar)
        self._tokenizing = Tokenizing(self._tokenize, self._sender)

    def start(self) -> None:
        """Start every thread."""
        self._loop.start()
        self._delivery.start()
        self._sender.start()
        self._tokenizing.start()
        self._intake.start()
        self._metrics.start(self)

    def close(self) -> None:
        """Refuse every request that still waits or runs, so that all are answered, and join every thread."""
        self._closing.set()
        self._intake.close()
        self._tokenizing.close()
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
        pulses = (*self._intake.pulses, self._delivery.pulse, self._sender.pulse)
        return min(self._loop.heartbeat, now - max(pulse.age(now) for pulse in pulses))

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
        self._metrics.finished(reason, choice.completion_tokens, choice.cached_tokens)

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
            call = self._call(request, inputs, arrival.responder)
            match call:
                case OpenRequest():
                    self._open(call, inputs)
                case TextCall():
                    self._tokenizing.submit(call)
                case DeltaChannel():
                    self._delivery.open(call)
                    self._sender.watch(call)
                case _:
                    self._answer(call, request)
        except Exception as error:  # noqa: BLE001 - confined to one request: only its client is told
            self._sender.refuse(call, *refusal(error))

    def _read(self, arrival: Arrival) -> tuple[Request, Inputs]:
        if self._closing.is_set():
            raise EngineStoppedError("the model is being unloaded")
        if arrival.inputs is None:
            raise InvalidRequestError("every input holds exactly one string")
        try:
            return decode_request(arrival.inputs.sampling), arrival.inputs
        except ValueError as error:  # msgspec's errors, and bytes that are not UTF-8
            raise InvalidRequestError(f"sampling: {error}") from error

    def _call(self, request: Request, inputs: Inputs, responder: Responder) -> Call:
        match request:
            case Generation():
                return OpenRequest(f"{next(self._keys)}", request, responder, self)
            case Tokenize() | Detokenize():
                return TextCall(request, inputs, responder)
            case OpenChannel():
                return DeltaChannel(request.open_channel, responder, self._delivery.close)
            case _:
                return Call("request", responder)

    def _answer(self, call: Call, request: Request) -> None:
        """Answer a probe or a cancel."""
        if isinstance(request, Cancel):
            meta = Meta(cancelled=self._cancel_by_id(request.cancel))
        elif self._loop.alive:
            meta = Meta(probe=self._report())
        else:
            # A report would look healthy; a refusal makes whoever monitors the model reload it.
            self._sender.refuse(call, RefusalCode.INTERNAL, "the engine has stopped")
            return
        self._sender.post(call, partial(call.send, "", meta, final=True))

    def _open(self, request: OpenRequest, inputs: Inputs) -> None:
        """Register a generation and have it prepared. Whatever fails from here on, its end unregisters it."""
        context = request.responder.trace_context
        if self._spans is not None and (on_end := self._spans.begin(context)) is not None:
            self._on_end[request.key] = on_end
        if len(self._requests) >= self._max_open:
            raise QueueFullError(f"{len(self._requests)} requests are open already")
        self._requests[request.key] = request
        self._sender.watch(request)
        self._intake.begin(request, inputs)

    def _prepare(self, request: OpenRequest, inputs: Inputs, compiled: Compiled | None) -> None:
        """Queue one request in the engine, or refuse it; on the intake's thread."""
        try:
            if (given_up := request.given_up()) is not None:
                self._sender.refuse(request, *given_up)
                return
            accepted = self._admit(request, inputs, compiled)
            self._sender.post(request, partial(self._accept, request, accepted))
        except Exception as error:  # noqa: BLE001 - confined to one request: only its client is told
            self._sender.refuse(request, *refusal(error))
        if request.cancelled:
            self.cancel(request)  # it may have been cancelled before the engine had it

    def _admit(self, request: OpenRequest, inputs: Inputs, compiled: Compiled | None) -> Accepted:
        """Render, tokenize, check and queue a request. Frames of a delta channel may overtake `accepted`."""
        if self._closing.is_set():
            raise EngineStoppedError("the model is being unloaded")
        generation = request.generation
        grammar = None if compiled is None else _result_of(compiled)
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
            channel.attach(streams, request.key)
            request.channel, request.streams = channel, streams
        request.choices = [
            self._choice(f"{request.key}.{index}", index, generation, inputs, prompt_ids)
            for index in range(generation.n)
        ]
        queued = engine_requests(
            generation,
            [choice.key for choice in request.choices],
            prompt_ids,
            max_tokens=new_tokens(generation, len(prompt_ids), self._max_context),
            stop_ids=self._text.stop_ids(generation),
            deadline=request.deadline,
            grammar=grammar,
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
        request.accept(accepted)
        self._metrics.accepted(accepted.prompt_tokens * request.generation.n)

    def _choice(
        self, key: str, index: int, generation: Generation, inputs: Inputs, prompt_ids: list[int]
    ) -> Choice:
        text = self._text
        stream = text.answer(generation)
        return Choice(
            key,
            index,
            generation,
            text.tokenizer,
            stream,
            echo=text.echo(generation, inputs.prompt.decode(), prompt_ids, stream),
            report=PromptReport.of(generation, text.tokenizer, prompt_ids),
        )

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

    def _tokenize(self, call: TextCall) -> tuple[str, Tokenized]:
        """Answer a request to tokenize; on the thread of `Tokenizing`."""
        if isinstance(call.request, Detokenize):
            return self._text.detokenize(call.request, self._vocabulary)
        prompt, history = call.inputs.prompt.decode(), decode_history(call.inputs.history)
        return "", self._text.tokenize(call.request, prompt, history)

    def _cancel_by_id(self, request_id: str) -> bool:
        found = [each for each in list(self._requests.values()) if each.generation.request_id == request_id]
        for request in found:
            self.cancel(request)
        return bool(found)

    def _cancel_all(self, keys: Iterable[str]) -> None:
        """Cancel the requests of a lost channel; on the delivery's thread."""
        for key in keys:
            if (request := self._requests.get(key)) is not None:
                self.cancel(request)

    def _report(self) -> ProbeReport:
        stats = self._loop.stats()
        return ProbeReport(
            heartbeat_age_s=round(time.monotonic() - self.heartbeat, 3),
            running=stats.running,
            waiting=stats.waiting,
            format=self._text.format.name,
            max_context=self._max_context,
        )


def _result_of(compiled: Compiled) -> CompiledGrammar | None:
    """Return a grammar, or raise why there is none.

    The future's own exception would refer, by its traceback, to the request that waits for it.
    """
    if (error := compiled.exception()) is not None:
        raise error.with_traceback(None) from None
    return compiled.result()


def build_service(
    parameters: EntryParameters, pb_utils: Any, *, orphaned: Callable[[], bool] = lambda: False
) -> Service:
    """Load the checkpoint and build the engine; nothing runs yet.

    Raises:
        ModelError: the checkpoint cannot be served as configured.
    """
    # Text first: it takes milliseconds, and so fails before gigabytes are read.
    text = load_text(parameters)
    text.grammars.prepare()  # or the first request with a grammar would wait for it
    options = parameters.options
    spans = make_spans(parameters)
    device = torch.device(parameters.device)
    dtype, reason = choose_dtype(options.get("dtype", "auto"), device)
    log.info("%s: %s on %s: %s", parameters.model, dtype, device, reason)
    with progress_bar(parameters.model) as progress:
        model = load_model(parameters.checkpoint, dtype, device, progress)
    if text.tokenizer.size > model.vocab_size:
        raise CheckpointError(
            f"{parameters.checkpoint}: the tokenizer has {text.tokenizer.size} ids and the weights have"
            f" {model.vocab_size}: they do not belong together"
        )
    vocabulary = model.vocab_size
    metrics = EngineMetrics(parameters.model, parameters.version, pb_utils, orphaned=orphaned)
    engine = Engine(model, engine_settings(parameters, device))
    if device.type == "cuda":
        # Kernels are compiled and libraries loaded at their first use, which must not be a client's request.
        warm_up(engine)
        # A full garbage collection that visits torch's objects, which live forever, takes over 100 ms.
        gc.collect()
        gc.freeze()
        # Nearly every torch call releases the interpreter lock. While another thread reads the requests of a
        # burst, the engine's thread gets the lock back only after this interval: 5 ms by default, and a step
        # takes 4 ms.
        sys.setswitchinterval(_SWITCH_S)
    return Service(
        engine,
        text,
        metrics,
        vocabulary=vocabulary,
        heartbeat_s=options.get("heartbeat_s", HEARTBEAT_S),
        spans=spans,
        orphaned=orphaned,
    )


def make_spans(parameters: EntryParameters) -> "ModelSpans | None":
    """Return the sender of the model's own spans; None if the entry does not ask for them.

    Raises:
        EntryError: the extra `tracing` is not installed.
    """
    endpoint = parameters.options.get("trace_endpoint")
    if endpoint is None:
        return None
    try:
        from triton_models.serving.spans import ModelSpans  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        raise EntryError("trace_endpoint needs the extra `tracing`") from error
    return ModelSpans(endpoint, parameters.model, parameters.version)


def engine_settings(parameters: EntryParameters, device: torch.device) -> EngineSettings:
    """Return the engine's settings: the entry's where it has them, else defaults that suit the device.

    Raises:
        SettingsError: values that contradict each other.
    """
    known = {field.name for field in fields(EngineSettings)}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.name in known:
            default = option.gpu if device.type == "cuda" else None
            value = parameters.options.get(option.name, default)
            if value is not None:
                values[option.name] = value
    return EngineSettings(**values)


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of weights and KV cache for the option's value, and why."""
    if wanted != "auto":
        return _DTYPES[wanted], "as set"
    if device.type == "cpu":
        return torch.float32, "few CPUs compute faster in 16 bits"
    if torch.cuda.is_bf16_supported():
        return torch.bfloat16, "half the memory, and the range of float32"
    return torch.float16, "half the memory; this GPU has no bfloat16"
