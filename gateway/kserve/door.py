"""What the KServe protocol offers for the served models, whether it comes over HTTP or gRPC.

A request for inference becomes one generation for each of its rows, and goes the way of every request: key,
limits, admission, deadline, failover. Knows nothing of JSON or protobuf: documents are plain dictionaries,
with the names that both encodings have.
"""

import asyncio
import time
from typing import Any, Final

from gateway.drain import Phase
from gateway.errors import (
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.exchange import Exchange
from gateway.flight import Flight, Receive
from gateway.generation import Delta, Generation, Turns
from gateway.kserve.contracts import (
    VERSION,
    InferRequest,
    Question,
    Tensor,
    choose_contract,
    config_document,
    metadata_document,
    read_questions,
    write_outputs,
)
from gateway.kserve.reply import Reply, read_reply
from gateway.resources import Gateway
from gateway.setting_types import Contract
from gateway.upstream import ModelCard
from gateway.version import version
from wire.meta import Segment

TOP_P: Final = 0.8
"""The default of the original `chat`; legacy clients have never been able to change it."""

_EXTENSIONS: Final = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
]
_RETRY_AFTER_S: Final = 1


class _Answer:
    """The raw answer to one row."""

    def __init__(self) -> None:
        self.text = ""
        self.segments: list[Segment] = []
        self.finished = False

    def take(self, delta: Delta) -> None:
        self.segments += [Segment(len(self.text) + each.at, each.role) for each in delta.segments]
        self.text += delta.text
        self.finished = self.finished or delta.finish_reason is not None


class Door:
    """The protocol's operations, on the models of `gateway`. Belongs to one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._contracts = {
            name: Contract(contract)
            for name, _, contract in (text.rpartition("=") for text in gateway.settings.contract)
        }
        self._statistics: dict[str, dict[str, Any]] = {}

    def ready(self) -> bool:
        """Whether requests will be served: every model that should be loaded answers, and no drain runs."""
        return self.gateway.ready()

    def model_ready(self, model: str, model_version: str = "") -> bool:
        """Whether requests for `model` will be served; False, too, if there is none."""
        try:
            card = self._card(model, model_version)
        except GatewayError:
            return False
        return card.ready and self.gateway.drain.phase is Phase.SERVING

    def server_metadata(self) -> dict[str, Any]:
        """Return the server's name, version and extensions of the protocol."""
        return {"name": "tritongate", "version": version(), "extensions": _EXTENSIONS}

    def metadata(self, model: str, model_version: str = "") -> dict[str, Any]:
        """Return the tensors of `model`.

        Raises:
            ModelNotFoundError: there is no such model, or version of it.
            UnavailableError: it has not been reached yet, so its contract is not known.
        """
        card = self._card(model, model_version)
        return metadata_document(card.id, self._contract(card))

    def config(self, model: str, model_version: str = "") -> dict[str, Any]:
        """Return the configuration of `model`; raises as `metadata`."""
        card = self._card(model, model_version)
        return config_document(card.id, self._contract(card))

    def statistics(self, model: str = "", model_version: str = "") -> dict[str, Any]:
        """Return what came through this door of this process since its start; without `model`, of all.

        Raises:
            ModelNotFoundError: there is no such model, or version of it.
        """
        cards = [self._card(model, model_version)] if model else self.gateway.upstream.models()
        return {"model_stats": [self._statistics_of(card.id) for card in cards]}

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Return the models that are served, or may be again; with `ready`, only those that answer."""
        return [
            {
                "name": card.id,
                "version": VERSION,
                "state": "READY" if card.ready else "UNAVAILABLE",
                "reason": "unloaded" if card.unloaded else "" if card.ready else "not ready",
            }
            for card in self.gateway.upstream.models()
            if card.ready or not ready
        ]

    async def load(self, model: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model and wait until it answers.

        Raises:
            GatewayError: it could not be loaded, or `parameters` want it with other files or configuration.
        """
        if parameters:
            raise InvalidRequestError(f"The parameter {min(parameters)[:100]!r} is not supported.")
        await self.gateway.upstream.load(model, reload=False, upstream=None)

    async def unload(self, model: str) -> None:
        """Unload a model and wait until it is gone.

        Raises:
            GatewayError: it could not be unloaded.
        """
        await self.gateway.upstream.unload(model, upstream=None)

    async def infer(self, request: InferRequest, exchange: Exchange, receive: Receive) -> list[Tensor]:
        """Answer the questions of a request; return the outputs that it asks for.

        Args:
            request: a client's; its shapes fit its elements.
            exchange: the record of the HTTP request or gRPC call.
            receive: reports the client's hang-up, as an ASGI channel; the body was read.

        Raises:
            GatewayError: any question could not be answered; of several, the message names the row.
        """
        card = self._card(request.model, request.version)
        exchange.model = card.id
        began, rows = time.perf_counter(), 0
        try:
            outputs, rows = await self._infer(card, request, exchange, receive)
        finally:
            self._count(card.id, rows, time.perf_counter() - began, exchange.queued_s or 0.0)
        return outputs

    def _count(self, model: str, rows: int, seconds: float, queued_s: float) -> None:
        """Count a request that took `seconds`; it has failed if it has no `rows`."""
        statistics = self._statistics_of(model)
        counts = statistics["inference_stats"]
        for name, duration_s in {"success" if rows else "fail": seconds, "queue": queued_s}.items():
            counts[name]["count"] += 1
            counts[name]["ns"] += int(duration_s * 1e9)
        if rows:
            statistics["last_inference"] = int(time.time() * 1000)
            statistics["inference_count"] += rows
            statistics["execution_count"] += 1

    def _statistics_of(self, model: str) -> dict[str, Any]:
        counts = {name: {"count": 0, "ns": 0} for name in ("success", "fail", "queue")}
        new = {"name": model, "version": VERSION, "last_inference": 0, "inference_count": 0}
        return self._statistics.setdefault(model, {**new, "execution_count": 0, "inference_stats": counts})

    async def _infer(
        self, card: ModelCard, request: InferRequest, exchange: Exchange, receive: Receive
    ) -> tuple[list[Tensor], int]:
        contract, chat_format = self._contract(card), card.chat_format or ""
        questions, batch_dimension = read_questions(contract, request, chat_format)
        if request.timeout_us:
            limit = asyncio.get_running_loop().time() + request.timeout_us / 1e6
            exchange.deadline = min(exchange.deadline, limit)
        flight = Flight(self.gateway, exchange)
        await flight.start(_generations(card, questions, exchange), receive)
        answers = [_Answer() for _ in questions]
        async for event in flight:
            if isinstance(event, Delta):
                answers[event.index].take(event)
        if not all(answer.finished for answer in answers):
            raise UpstreamProtocolError("The answer ended before it was complete.")
        pairs = [
            (question, _reply(question, answer, chat_format))
            for question, answer in zip(questions, answers, strict=True)
        ]
        outputs = write_outputs(contract, request, pairs, batch_dimension=batch_dimension)
        return outputs, len(questions)

    def _card(self, model: str, model_version: str) -> ModelCard:
        try:
            card = self.gateway.upstream.model(model)
        except ModelNotFoundError:
            shown = repr(model[:100])
            raise ModelNotFoundError(
                f"Request for unknown model: {shown} is not found", param="model_name"
            ) from None
        if model_version not in ("", VERSION):
            raise ModelNotFoundError(
                f"Request for unknown model: {card.id!r} has one version here, {VERSION}",
                param="model_version",
            )
        return card

    def _contract(self, card: ModelCard) -> Contract:
        contracts = self._contracts
        if not (card.ready or card.chat_format or card.id in contracts or "" in contracts):
            raise UnavailableError(
                f"The model {card.id} has not been reached yet.", retry_after_s=_RETRY_AFTER_S
            )
        return choose_contract(contracts, card.id, card.chat_format)


def _generations(card: ModelCard, questions: list[Question], exchange: Exchange) -> list[Generation]:
    return [
        Generation(
            request_id=exchange.request_id,
            model=card.id,
            prompt=Turns(question.history.turns, question.prompt),
            prompt_field=f"row {row}" if len(questions) > 1 else None,
            deadline=exchange.deadline,
            temperature=question.temperature,
            top_p=TOP_P,
            max_total_tokens=question.max_total_tokens,
        )
        for row, question in enumerate(questions)
    ]


def _reply(question: Question, answer: _Answer, chat_format: str) -> Reply:
    try:
        return read_reply(answer.text, answer.segments, question.history.turns, chat_format)
    except ValueError as error:
        raise UpstreamProtocolError(f"The answer cannot be read: {error}.") from None
