"""The engine: token ids in, token ids out, one step at a time."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from triton_models.engine.backend import Backend, choose_backend
from triton_models.engine.blocks import BlockManager
from triton_models.engine.capacity import choose_capacity, longest_context
from triton_models.engine.masks import tell_masks
from triton_models.engine.models import CausalModel
from triton_models.engine.runner import Runner
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import (
    FinishReason,
    Request,
    Sequence,
    SequenceState,
    TokenOutput,
    check_request,
)
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Sampled, Step
from triton_models.errors import EngineStoppedError, InvalidRequestError, QueueFullError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step."""

    batch_size: int
    """Sequences in the step."""
    prefill_tokens: int
    decode_tokens: int
    """Tokens of decoding sequences that became part of an answer."""
    guessed_tokens: int = 0
    """Guesses at these (`Drafter`)."""
    right_guesses: int = 0
    """Those that became part of an answer."""
    seconds: float
    """From scheduling to sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    preemptions: int
    """Since the engine was built."""
    failed_steps: int
    """Since the engine was built."""


class Engine:
    """Continuous batching over one model: every step is schedule, run, post-process.

    `add`, `cancel` and `stats` may be called from any thread; everything else belongs to the engine's thread.
    Outputs are kept until `take_outputs`, so that a failing step loses none. The backend may change the
    layout of the model's weight matrices.

    Attributes:
        settings: its limits.
        vocabulary: number of token ids that the model has.
        clock: returns monotonic seconds, as `deadline` and `since` of requests are.
    """

    def __init__(
        self,
        model: CausalModel,
        settings: EngineSettings,
        *,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        backend = backend or choose_backend(model.device, model.dtype)
        log.info("%s", backend.reason)
        if backend.convert is not None:
            model.convert(backend.convert)
        self._overlap = backend.overlap
        self._drafts = backend.drafts
        settings = replace(settings, block_size=settings.block_size or backend.block_size)
        self.settings = settings
        self.vocabulary = model.vocab_size
        self.clock = clock
        self._runner = Runner(model, backend, settings, context=longest_context(settings, model))
        self._capacity = choose_capacity(settings, model, self._runner.run_largest)
        log.info("%s", self._capacity.reason)
        self._runner.allocate(self._capacity.kv_blocks, context=self._capacity.max_context)
        self._launched: Step | None = None
        self._fault: Exception | None = None
        self._uncollected = deque[Step]()
        """Steps that were scheduled and are not known to have finished."""
        self._collected_at = 0.0
        self._intake = Intake(settings.max_running + settings.max_waiting)
        self._arrivals = itertools.count()
        self._preemptions = self._failed_steps = 0
        self._outputs: list[TokenOutput] = []
        self._times = self._runner.capture(settings.max_batched_tokens)
        self._start_scheduler()

    @property
    def max_context(self) -> int:
        """The most tokens that a request may have, prompt and answer together."""
        return self._capacity.max_context

    @property
    def open_requests(self) -> int:
        """Number of requests without a final output yet."""
        return self._intake.open

    def add(self, *requests: Request) -> None:
        """Take requests, all or none, with ids of which none is open; later steps produce their outputs.

        Raises:
            PromptTooLongError: the context cannot hold one.
            InvalidRequestError: a token id outside the vocabulary, an empty prompt, or too many at once.
            QueueFullError: over `max_running + max_waiting` requests would be open.
            EngineStoppedError: the engine has stopped.
        """
        for request in requests:
            if request.since is None:  # what goes on was checked, and a long prompt takes time
                check_request(request, max_context=self.max_context, vocabulary=self.vocabulary)
        now = self.clock()
        self._intake.add(
            [
                Sequence(
                    request,
                    arrival=next(self._arrivals),
                    arrived_at=now if request.since is None else request.since,
                    max_tokens=request.sampling.max_tokens or self.max_context - len(request.prompt_ids),
                )
                for request in requests
            ]
        )

    def cancel(self, request_id: str) -> bool:
        """End a request before the next step; its last output says CANCELLED. False if it is not open."""
        return self._intake.cancel(request_id)

    def note_times(self, step_s: float, row_s: float) -> None:
        """Note what a step of one row takes, and what one row more adds: it decides how much is guessed."""
        self._drafts = self._scheduler.drafts = replace(self._drafts, step_s=step_s, row_s=row_s)

    def stats(self) -> EngineStats:
        """Return the current counts."""
        running = len(self._scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(0, self._intake.open - running),
            kv_blocks_used=self._blocks.used,
            kv_blocks=self._capacity.kv_blocks,
            preemptions=self._preemptions,
            failed_steps=self._failed_steps,
        )

    def step(self) -> StepStats | None:
        """Finish a step; None if there was nothing to compute.

        With overlap, the following step is launched before waiting for this one's results, except for its
        sampling where a token mask has to be told these results first. If that fails, the next call raises
        the error, because this step's results come first.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        current = self._launched or self._launch()
        self._launched = None
        if current is None:
            return None
        self._launch_next()
        stats = self._collect(current)
        # What had to wait for these results, as guesses do, need not wait for their delivery, too.
        self._launch_next()
        return stats

    def take_outputs(self) -> list[TokenOutput]:
        """Return the outputs since the last call, oldest first."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_running(self, error: str) -> None:
        """Recover from a step that raised: end its requests with `error`, and start with an empty KV cache.

        Requests that ran only in earlier steps are recomputed. If no step is to blame, all running ones end.
        """
        self._failed_steps += 1
        blamed = {chunk.sequence for step in self._uncollected for chunk in step.chunks}
        self._forget_steps()
        # Only the sequences' tokens are used again: the failed step may have left anything else half done.
        self._start_scheduler()
        for sequence in self._intake.collect_all():
            ran = sequence.state is not SequenceState.WAITING
            if ran and (sequence in blamed or not blamed):
                self._close(Sampled(sequence), FinishReason.FAULT, error)
            else:
                sequence.start_over()
                self._scheduler.add(sequence)
        self._runner.reset()

    def shut_down(self, reason: FinishReason, error: str) -> None:
        """Take no more requests, and end every open one."""
        self._intake.close()
        self._forget_steps()
        self._start_scheduler()
        for sequence in self._intake.collect_all():
            self._close(Sampled(sequence), reason, error)

    def _forget_steps(self) -> None:
        self._launched = self._fault = None
        self._uncollected.clear()

    def _start_scheduler(self) -> None:
        self._blocks = BlockManager(self._capacity.kv_blocks, self.settings.block_tokens)
        self._scheduler = Scheduler(self._blocks, self.settings, self._drafts, self._times)

    def _launch_next(self) -> None:
        """With overlap, launch the step after the one that is collected, or sample it if that is left."""
        if not self._overlap or self._fault is not None:
            return
        try:
            if self._launched is None:
                self._launched = self._launch()
            elif self._launched.staged is not None:
                self._runner.sample(self._launched)
        except Exception as error:  # noqa: BLE001 - raised by the next call of `step`
            self._fault = error

    def _launch(self) -> Step | None:
        """Schedule a step and have the device compute it; None if there is nothing to compute.

        Its sampling is left out if one of its token masks must first be told a token in flight.
        """
        self._take_requests_and_cancels()
        scheduled_at = time.perf_counter()
        step = self._scheduler.schedule()
        step.scheduled_at = scheduled_at
        self._preemptions += step.preemptions
        if not step.chunks:
            return None
        self._uncollected.append(step)
        for chunk in step.prefills:
            if chunk.sequence.scheduled_at is None:
                chunk.sequence.scheduled_at = self.clock()
        self._runner.begin(step)
        if not step.masks_wait:
            self._runner.sample(step)
        step.advance()
        return step

    def _collect(self, step: Step) -> StepStats:
        """Wait for a step's results and apply them."""
        results = self._runner.collect(step)
        accepted = [self._accept(each) for each in results]
        for sequence, fault in tell_masks(results).items():
            self._finish(Sampled(sequence), *fault)
        self._uncollected.popleft()
        prompts = {chunk.sequence for chunk in step.prefills}
        guessed, right = _guesses(step)
        now = time.perf_counter()
        started, self._collected_at = max(step.scheduled_at, self._collected_at), now
        return StepStats(
            batch_size=len(step.chunks),
            prefill_tokens=sum(chunk.count for chunk in step.prefills),
            decode_tokens=sum(
                one
                for each, one in zip(results, accepted, strict=True)
                if not prompts or each.sequence not in prompts
            ),
            guessed_tokens=guessed,
            right_guesses=right,
            seconds=now - started,
        )

    def _take_requests_and_cancels(self) -> None:
        """Put new requests on the waiting list; end those that were cancelled or timed out."""
        sequences, cancelled = self._intake.collect()
        for sequence in sequences:
            self._scheduler.add(sequence)
        for sequence in cancelled:
            if sequence.state is not SequenceState.FINISHED:
                self._finish(Sampled(sequence), FinishReason.CANCELLED)
        for sequence in self._scheduler.expired(self.clock()):
            self._finish(Sampled(sequence), FinishReason.DEADLINE)

    def _accept(self, sampled: Sampled) -> bool:
        """Append a sampled token to its sequence, and end the sequence if due; False if there is none."""
        sequence = sampled.sequence
        if sequence.state is SequenceState.FINISHED:
            return False  # The sequence ended while the device was computing this token.
        if sampled.fault is not None:
            self._finish(sampled, *sampled.fault)
            return False
        if sampled.token_id is None:
            self._output(sampled)
            return False
        params = sequence.request.sampling
        sequence.append(sampled.token_id)
        if sampled.token_id in params.stop_token_ids:
            self._finish(sampled, FinishReason.STOP)
        elif len(sequence.tokens) >= sequence.max_length:
            self._finish(sampled, FinishReason.LENGTH)
        else:
            self._output(sampled)
        return True

    def _finish(self, last: Sampled, reason: FinishReason, error: str | None = None) -> None:
        """Remove a sequence from the scheduler, free its blocks and emit its final output."""
        self._scheduler.remove(last.sequence, invalid=last.invalid)
        self._close(last, reason, error)

    def _close(self, last: Sampled, reason: FinishReason, error: str | None) -> None:
        """Emit the final output of a sequence that has left the scheduler, and forget it."""
        last.sequence.move_to(SequenceState.FINISHED)
        self._intake.end(last.sequence.request.request_id)
        self._output(last, reason, error)

    def _output(self, sampled: Sampled, reason: FinishReason | None = None, error: str | None = None) -> None:
        sequence = sampled.sequence
        queue_seconds = time_to_first_token = None
        if sampled.token_id is not None and not sequence.times_told and sequence.scheduled_at is not None:
            sequence.times_told = True
            queue_seconds = sequence.scheduled_at - sequence.arrived_at
            time_to_first_token = self.clock() - sequence.arrived_at
        self._outputs.append(
            TokenOutput(
                request_id=sequence.request.request_id,
                prompt_tokens=len(sequence.request.prompt_ids),
                token_id=sampled.token_id,
                logprobs=sampled.logprobs,
                prompt_logprobs=sampled.prompt_logprobs,
                prompt_logits=sampled.prompt_logits,
                finish_reason=reason,
                error=error,
                cached_tokens=sequence.cached_tokens or 0,
                queue_seconds=queue_seconds,
                time_to_first_token=time_to_first_token,
            )
        )


def _guesses(step: Step) -> tuple[int, int]:
    """Return how many guesses a step had whose results have been applied, and how many were right."""
    guessed = right = 0
    for chunk in step.drafts:
        guessed += len(chunk.guesses)
        # None at all, if it ended before these results came.
        right += max(0, len(chunk.sequence.tokens) - chunk.start - 2) if chunk.guesses else 0
    return guessed, right


class Intake:
    """Takes requests and cancels from any thread; the engine's thread collects them before each step.

    It knows which requests are open, so it can refuse new ones at once, on the caller's thread. `limit` is
    how many may be open, running and waiting together: a limit on the waiting ones alone would refuse part of
    a burst that meets an idle engine, which has not had a step yet to start any of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[str, Sequence] = {}
        self._new: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._closed = False

    @property
    def open(self) -> int:
        """Number of requests without a final output yet."""
        return len(self._open)

    def add(self, sequences: list[Sequence]) -> None:
        """Open requests: all of them, or none.

        Raises:
            EngineStoppedError: the engine takes no more requests.
            InvalidRequestError: there are more of them than may ever be open.
            QueueFullError: too many other requests are open; not for those that go on for one that was.
        """
        new = sum(each.request.since is None for each in sequences)
        with self._lock:
            if self._closed:
                raise EngineStoppedError("the engine has stopped")
            if new > self._limit:
                raise InvalidRequestError(
                    f"{new} requests at once are more than the {self._limit} that may be open"
                )
            if new and len(self._open) + new > self._limit:
                raise QueueFullError(f"{len(self._open)} requests are open already")
            self._open |= {each.request.request_id: each for each in sequences}
            self._new += sequences

    def cancel(self, request_id: str) -> bool:
        """Have the engine end a request; False if it is not open."""
        with self._lock:
            sequence = self._open.get(request_id)
            if sequence is not None:
                self._cancelled.append(sequence)
            return sequence is not None

    def collect(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return what was added and what was cancelled since the last call, each in order.

        What was cancelled may have ended before, or be there twice.
        """
        with self._lock:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
        return new, cancelled

    def collect_all(self) -> list[Sequence]:
        """Return every open sequence, whether collected before or not; cancels are left for later."""
        with self._lock:
            self._new = []
            return list(self._open.values())

    def end(self, request_id: str) -> None:
        """Record that a request had its final output."""
        with self._lock:
            del self._open[request_id]

    def close(self) -> None:
        """Take no more requests; those already taken can still be collected."""
        with self._lock:
            self._closed = True
