"""Beam search: the most likely answers, not sampled ones. Above the engine, which sees only requests.

A step of a search is one request of one token for each of its beams. They begin alike, so they hold the same
KV blocks, which the prefix cache finds; of the last block, which is not full, each beam gets a copy. So a
beam computes its newest token only. What is evicted between two steps is computed once for all beams, as
after a preemption.

Source of the search (divergence 19): `GenerationMixin._beam_search` of transformers 5, without sampling. The
power of the length is that of Wu et al., "Google's neural machine translation system", 2016, simplified.
"""

import enum
import logging
import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Literal

from msgspec import structs

from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Request, TokenLogprobs, TokenOutput, check_request
from triton_models.errors import EngineStoppedError, InvalidRequestError

log = logging.getLogger(__name__)

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How wide a search is, how answers of different lengths compare, and when it is over."""

    width: int
    """Beams, at least one, that go on at each position, and answers that are compared at the end."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its log-probabilities over its number of tokens, the stop id included,
    to this power: more than 0 favours long answers."""
    early_stopping: EarlyStopping = False
    """Once there are `width` answers, the search is over. False: only if the best beam's score, as long as it
    is now, is no better than the worst answer's. `never`: that score is taken at the full length, if
    `length_penalty` favours long answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRequest:
    """A request for the best answers of a beam search.

    `request`: the prompt, stop ids, `max_tokens`, `logprobs`, priority and deadline; nothing else of its
    sampling parameters is used. `answers`: the ids of the answers by rank, best first, at most as many as
    there are beams; None: not wanted. Each answer is reported as if it were a request's, at the search's end.
    """

    request: Request
    params: BeamParams
    answers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Beam:
    """What follows the prompt: token ids, the sum of their log-probabilities, and those of each."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()

    def then(self, token_id: int, logprob: float, report: TokenLogprobs) -> "Beam":
        """Return it with one more token, of the log-probabilities `report`."""
        told = TokenLogprobs(id=token_id, logprob=logprob, top=report.top)
        return Beam((*self.tokens, token_id), self.total + logprob, (*self.logprobs, told))


@dataclass(frozen=True, slots=True)
class Answer:
    """A beam that has ended, and its score."""

    beam: Beam
    score: float


class BeamSearch:
    """The search itself: knows log-probabilities, no model.

    Attributes:
        beams: those that go on, best first, all of one length: at first the prompt alone.
        answers: the best that have ended, best first, at most `width`.
        over: whether no beam goes on.
    """

    def __init__(self, params: BeamParams, *, stop_ids: Collection[int], max_tokens: int) -> None:
        self.beams: Sequence[Beam] = (Beam(),)
        self.answers: list[Answer] = []
        self.over = False
        self._params = params
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens

    @property
    def candidates(self) -> int:
        """How many of the next tokens of each beam take part: of these, `width` are no stop ids."""
        return self._params.width + len(self._stop_ids)

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """Go on by one token.

        Args:
            reports: for each of the beams, in their order, the log-probabilities of its next token: at least
                the first `candidates` of the most likely ones, as far as the model has so many.
        """
        width = self._params.width
        ranked = sorted(
            (
                (beam.total + logprob, place, token_id, logprob)
                for place, (beam, report) in enumerate(zip(self.beams, reports, strict=True))
                for token_id, logprob in report.top[: self.candidates]
            ),
            key=itemgetter(0),
            reverse=True,
        )
        length = len(self.beams[0].tokens) + 1
        beams: list[Beam] = []
        for rank, (_, place, token_id, logprob) in enumerate(ranked):
            ends = length == self._max_tokens or token_id in self._stop_ids
            # An answer has to be among the best candidates; beams go on behind those that end.
            if rank < width if ends else len(beams) < width:
                beam = self.beams[place].then(token_id, logprob, reports[place])
                if ends:
                    self.answers.append(Answer(beam, self._score(beam.total, length)))
                else:
                    beams.append(beam)
        self.answers = sorted(self.answers, key=attrgetter("score"), reverse=True)[:width]
        self.beams = beams
        self.over = not beams or (len(self.answers) == width and not self._may_improve(length))

    def _may_improve(self, length: int) -> bool:
        """Whether the search goes on although it has all of its answers."""
        early = self._params.early_stopping
        if early is True:
            return False
        if early == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._score(self.beams[0].total, length) > self.answers[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._params.length_penalty)


class _State(enum.Enum):
    """RUNNING -> CANCELLED or ENDED; CANCELLED -> ENDED."""

    RUNNING = enum.auto()
    CANCELLED = enum.auto()
    """Ends at the next output of one of its beams."""
    ENDED = enum.auto()
    """What its beams still compute is dropped."""


@dataclass(slots=True, eq=False)
class _Running:
    """A search in the engine, and what its beams have been answered so far in this step."""

    beam_request: BeamRequest
    search: BeamSearch
    logprobs: int
    """How many of the most likely tokens each step reports."""
    arrived_at: float
    state: _State = _State.RUNNING
    members: dict[str, int] = field(default_factory=dict)
    """The beams' requests in the engine: the place of each."""
    reports: dict[int, TokenLogprobs] = field(default_factory=dict)
    first: TokenOutput | None = None
    """The first step's output."""

    def requests(self) -> list[Request]:
        """Return the requests of the next step."""
        request, beams = self.beam_request.request, self.search.beams
        sampling = SamplingParams(
            temperature=0.0, max_tokens=len(beams[0].tokens) + 1, logprobs=self.logprobs
        )
        self.reports = {}
        self.members = {f"{request.request_id}/{place}": place for place in range(len(beams))}
        return [
            Request(
                request_id=member,
                prompt_ids=request.prompt_ids,
                sampling=sampling,
                generated_ids=beam.tokens,
                priority=request.priority,
                deadline=request.deadline,
                since=self.arrived_at if beam.tokens else None,
                shares_tail=True,
            )
            for member, beam in zip(self.members, beams, strict=True)
        ]

    def note(self, output: TokenOutput, logprobs: TokenLogprobs) -> bool:
        """Note what follows one beam; return whether it was the last one of the step."""
        self.first = self.first or output
        self.reports[self.members[output.request_id]] = logprobs
        return len(self.reports) == len(self.members)

    def advance(self) -> None:
        """Go on by one token, once all beams of the step are noted."""
        self.search.advance([self.reports[place] for place in range(len(self.members))])

    def answered(self, seconds: float) -> list[TokenOutput]:
        """Return the outputs of the answers, `seconds` after the request came."""
        outputs: list[TokenOutput] = []
        for request_id, answer in zip(self.beam_request.answers, self.search.answers, strict=False):
            if request_id is not None:
                outputs += self._outputs(request_id, answer.beam, seconds)
        return outputs

    def failed(self, reason: FinishReason, error: str | None) -> list[TokenOutput]:
        """Return the outputs of a search that ends without answers."""
        prompt_tokens = len(self.beam_request.request.prompt_ids)
        return [
            TokenOutput(request_id=each, prompt_tokens=prompt_tokens, finish_reason=reason, error=error)
            for each in self.beam_request.answers
            if each is not None
        ]

    def _outputs(self, request_id: str, beam: Beam, seconds: float) -> list[TokenOutput]:
        request, first, last = self.beam_request.request, self.first, len(beam.tokens) - 1
        asked = request.sampling.logprobs
        stopped = beam.tokens[-1] in request.sampling.stop_token_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return [
            TokenOutput(
                request_id=request_id,
                prompt_tokens=len(request.prompt_ids),
                token_id=told.id,
                logprobs=None if asked is None else structs.replace(told, top=told.top[:asked]),
                finish_reason=reason if at == last else None,
                cached_tokens=first.cached_tokens if first else 0,
                queue_seconds=first.queue_seconds if first and at == 0 else None,
                time_to_first_token=seconds if at == 0 else None,
            )
            for at, told in enumerate(beam.logprobs)
        ]


class BeamSearches:
    """Takes requests for an engine, and runs the beam searches among them.

    `add` and `cancel` may be called from any thread; `take_outputs` belongs to the engine's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        """Held while a search goes on to its next step, which a cancel must not miss."""
        self._answers: dict[str, _Running] = {}
        """The open searches by the ids of their answers."""
        self._members: dict[str, _Running] = {}
        """The searches by the ids of their requests in the engine."""

    def add(self, *requests: Request | BeamRequest) -> None:
        """Take requests, all or none.

        Raises:
            ModelError: as `Engine.add`; also InvalidRequestError for more beams than the model has tokens.
        """
        plain = [each for each in requests if isinstance(each, Request)]
        begun = [self._begin(each) for each in requests if isinstance(each, BeamRequest)]
        if not begun:
            self._engine.add(*plain)
            return
        with self._lock:
            self._engine.add(*plain, *(first for each in begun for first in each.requests()))
            for each in begun:
                self._members |= dict.fromkeys(each.members, each)
                self._answers |= dict.fromkeys(filter(None, each.beam_request.answers), each)

    def cancel(self, request_id: str) -> bool:
        """End a request before the next step, or the search of which it is an answer; False if not open."""
        with self._lock:
            running = self._answers.get(request_id)
            if running is None:
                return self._engine.cancel(request_id)
            running.state = _State.CANCELLED
            for member in running.members:
                self._engine.cancel(member)
            return True

    def take_outputs(self) -> list[TokenOutput]:
        """Return the engine's outputs since the last call, with the answers of searches that are over."""
        outputs = self._engine.take_outputs()
        with self._lock:
            if not self._members:
                return outputs
            told: list[TokenOutput] = []
            for output in outputs:
                running = self._members.pop(output.request_id, None)
                if running is None:
                    told.append(output)
                elif running.state is not _State.ENDED:
                    told += self._take_or_fail(running, output)
            return told

    def _begin(self, beam_request: BeamRequest) -> _Running:
        request, width = beam_request.request, beam_request.params.width
        vocabulary, context = self._engine.vocabulary, self._engine.max_context
        check_request(request, max_context=context, vocabulary=vocabulary)
        if width > vocabulary:
            raise InvalidRequestError(f"{width} beams are more than the vocabulary of {vocabulary}")
        search = BeamSearch(
            beam_request.params,
            stop_ids=request.sampling.stop_token_ids,
            max_tokens=request.sampling.max_tokens or context - len(request.prompt_ids),
        )
        return _Running(
            beam_request,
            search,
            logprobs=min(vocabulary, max(search.candidates, request.sampling.logprobs or 0)),
            arrived_at=self._engine.clock(),
        )

    def _take_or_fail(self, running: _Running, output: TokenOutput) -> list[TokenOutput]:
        try:
            return self._take(running, output)
        except Exception:
            # Confined to one search: the engine's thread must go on with the others.
            log.exception("the beam search %s failed", running.beam_request.request.request_id)
            return self._fail(running, FinishReason.ERROR, "the beam search failed")

    def _take(self, running: _Running, output: TokenOutput) -> list[TokenOutput]:
        """Note what follows one beam; with the last beam's, go on. Returns what clients are told."""
        if output.logprobs is None or output.finish_reason is not FinishReason.LENGTH:
            return self._fail(running, output.finish_reason or FinishReason.ERROR, output.error)
        if not running.note(output, output.logprobs):
            return []
        running.advance()
        if running.search.over:
            self._end(running)
            return running.answered(self._engine.clock() - running.arrived_at)
        if running.state is _State.CANCELLED:
            return self._fail(running, FinishReason.CANCELLED)
        try:
            self._engine.add(*running.requests())
        except EngineStoppedError as error:
            return self._fail(running, FinishReason.SHUTDOWN, str(error))
        self._members |= dict.fromkeys(running.members, running)
        return []

    def _fail(self, running: _Running, reason: FinishReason, error: str | None = None) -> list[TokenOutput]:
        """End a search without answers."""
        self._end(running)
        for member in running.members:
            self._engine.cancel(member)
        return running.failed(reason, error)

    def _end(self, running: _Running) -> None:
        running.state = _State.ENDED
        for request_id in filter(None, running.beam_request.answers):
            self._answers.pop(request_id, None)
