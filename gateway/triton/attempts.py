"""The attempts of one request to be answered: which replicas were asked, and how far the answer has come."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence

from msgspec.structs import replace
from opentelemetry.trace import Span

from gateway.core.request import Generation
from gateway.core.upstream import Embedding, Tokenization
from gateway.errors import UpstreamProtocolError
from gateway.telemetry.tracing import Attribute, Headers, Trace, current_trace
from gateway.triton.affinity import nearest, prefix_key
from gateway.triton.dialects.base import ChannelDecoder, Channels, ModelReport
from gateway.triton.errors import Fault, TritonError
from gateway.triton.replicas import Replica, ReplicaState


class Attempts:
    """The attempts of one request: calls in the trace of the current task's HTTP request.

    An HTTP request with several prompts has one of these per prompt.

    Args:
        request: what is to be answered.
        wait_s: how long it waits in all while no Triton serves its model.
    """

    def __init__(self, request: Generation | Tokenization | Embedding, wait_s: float = 0.0) -> None:
        self.request = request
        self.wait_s = wait_s
        """What is left of that."""
        self.model = request.public_name or request.model
        """What the client's model is called in logs, metrics and traces."""
        self.tried: list[Replica] = []
        """Those that failed, and are not to be asked again."""
        self.called: list[str] = []
        """The addresses of the Tritons that were called, in order."""
        self.delivered = False
        """Whether the client has part of the answer, which cannot be taken back."""
        self.failure: TritonError | None = None
        """Why the latest attempt failed."""
        self.answer: ChannelDecoder | None = None
        """What reads the answer, if it can be resumed."""
        self.started = False
        """Whether a replica has accepted the request whose answer can be resumed."""
        self.resumes = 0
        """How often it was."""
        self.whole = False
        """Whether all of an answer that is to be streamed comes with its end."""
        self._accepted = False
        self._seed = secrets.randbits(63)
        """Of a request without one: whoever resumes its answer needs the same."""
        self._model: tuple[str | None, int | None] = None, None
        """Chat format and context of the model that began the answer."""
        self._trace = current_trace.get() or Trace()
        self._trace.calls.append(self.called)

    @property
    def complete(self) -> bool:
        """Whether all of the answer was read."""
        return self.answer is not None and self.answer.complete

    def accept(self) -> bool:
        """Note that a replica has accepted the request; false if it is not the first one."""
        first, self._accepted = not self._accepted, True
        self.started = self.answer is not None
        return first

    def next(
        self, request: Generation, channels: Channels | None, report: ModelReport
    ) -> tuple[Generation, ChannelDecoder | None]:
        """Return the first attempt's `request` for the model of `report`, and what reads a resumable answer.

        `channels` are those of the model's contract; None: nothing is to be resumed.
        """
        seed = self._seed if request.seed is None else request.seed
        if self.started and self.answer is not None:
            generated = self.answer.resume()
            return replace(request, resumable=True, seed=seed, generated=generated), self.answer
        if channels is None or not report.resumes:
            self.answer = None
            return request, None
        request = replace(request, resumable=True, seed=seed)
        self.answer, self._model = channels.decoder(request, report), _model_of(report)
        return request, self.answer

    def able(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Return those that take the request now, and have not failed; an answer goes on with its model."""
        return [
            each
            for each in replicas
            if each.state is ReplicaState.READY
            and not each.yielding
            and each not in self.tried
            and (not self.started or self._goes_on_at(each))
        ]

    def _goes_on_at(self, replica: Replica) -> bool:
        dialect, report = replica.serving()
        return dialect.channels is not None and report.resumes and _model_of(report) == self._model

    def choose(self, replicas: Sequence[Replica]) -> Replica | None:
        """Return an able replica: one that may know the prompt's beginning, or the one where least runs.

        Of equals, it is the least recently chosen. One that is on trial gets few requests at once, unless
        there is no other: nothing is refused for that.
        """
        ready = self.able(replicas)
        ready = [replica for replica in ready if replica.has_room] or ready
        request = self.request
        if len(ready) > 1 and isinstance(request, Generation):
            key = prefix_key(request.model, request.prompt)
            if key is not None:
                return nearest(ready, key)
        if not ready:
            return None
        chosen = min(ready, key=lambda replica: (replica.outstanding, replica.last_chosen))
        chosen.last_chosen = max(replica.last_chosen for replica in replicas) + 1
        return chosen

    @contextlib.contextmanager
    def call(self, replica: Replica) -> Iterator[tuple[Span, Headers]]:
        """Record a call to `replica`; yields its span, and the headers that continue the trace there.

        Raises:
            TritonError: as the block, which may also end with an UpstreamProtocolError.
        """
        self.called.append(replica.upstream)
        attributes: dict[str, Attribute] = {
            "server.address": replica.upstream,
            "rpc.system": "grpc",
            "gen_ai.request.model": self.model,
            "tritongate.attempt": len(self.called),
        }
        with self._trace.part("call", attributes) as span:
            try:
                yield span, self._trace.headers(span)
            except UpstreamProtocolError as error:
                raise TritonError(Fault.PROTOCOL, error.message, message=error.message) from error


def _model_of(report: ModelReport) -> tuple[str | None, int | None]:
    """Return what a model that goes on with an answer has in common with the one that began it."""
    return report.chat_format, report.max_context
