"""What the KServe protocol offers for the served models, whether it comes over HTTP or gRPC.

A request for inference becomes one generation for each of its rows, for an answer or for logits, and goes the
way of every request: key, limits, admission, deadline, failover. Knows nothing of JSON or protobuf: documents
are plain dictionaries, with the names that both encodings have.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway import version
from gateway.core.events import Delta
from gateway.core.request import Generation, PlainText, TokenIds, Turns
from gateway.core.upstream import ModelCard, Tokenization, Tokens
from gateway.errors import (
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.http.record import Gateway, RequestRecord
from gateway.http.run import Receive, RunningRequest
from gateway.kserve.contracts import (
    MAX_ROWS,
    SIGNATURES,
    VERSION,
    InferRequest,
    Question,
    Signature,
    Tensor,
    config_document,
    contract_of,
    metadata_document,
    read_questions,
    write_outputs,
)
from gateway.kserve.history import Reply, read_reply
from gateway.kserve.logits import (
    SUFFIX,
    TOKENIZER,
    LogitsTensor,
    logits_signature,
    padded,
    read_prompts,
    read_texts,
)
from gateway.limits.admission import Admission, Phase
from gateway.settings.values import Contract
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

_DURATIONS: Final = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
"""What statistics count, all of which clients look up; some of it never happens here."""


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


class _Found(NamedTuple):
    """What a client's name means."""

    card: ModelCard
    tokenizer: bool = False
    """Its tokenizer is meant."""

    @property
    def name(self) -> str:
        """What it is called in statistics, whichever name was asked for."""
        return self.card.id + SUFFIX * self.tokenizer


class Door:
    """The protocol's operations, on the models of `gateway`. Belongs to one event loop.

    Models are addressed by their public names and aliases alone: keys and limits are set for these, and
    several may share an entry. `key` is the name of the caller's key; models that are not for it do not exist
    for it.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._statistics: dict[str, dict[str, Any]] = {}

    def ready(self) -> bool:
        """Whether requests will be served: as `Gateway.ready`."""
        return self.gateway.ready()

    def model_ready(self, model: str, model_version: str = "", key: str | None = None) -> bool:
        """Whether requests for `model` will be served; False, too, if there is none."""
        try:
            card = self._find(model, model_version, key).card
        except GatewayError:
            return False
        return card.ready and self.gateway.drain.phase is Phase.SERVING

    def server_metadata(self) -> dict[str, Any]:
        """Return the server's name, version and extensions of the protocol."""
        return {"name": "tritongate", "version": version(), "extensions": _EXTENSIONS}

    def metadata(self, model: str, model_version: str = "", key: str | None = None) -> dict[str, Any]:
        """Return the tensors of `model`.

        Raises:
            ModelNotFoundError: there is no such model, or version of it.
            UnavailableError: it has not been reached yet, so its contract is not known.
        """
        return metadata_document(model, self._signature(self._find(model, model_version, key)))

    def config(self, model: str, model_version: str = "", key: str | None = None) -> dict[str, Any]:
        """Return the configuration of `model`; raises as `metadata`."""
        return config_document(model, self._signature(self._find(model, model_version, key)))

    def statistics(self, model: str = "", model_version: str = "", key: str | None = None) -> dict[str, Any]:
        """Return what came through this door of this process since its start; without `model`, of all.

        Raises:
            ModelNotFoundError: there is no such model, or version of it.
        """
        if model:
            names = [self._find(model, model_version, key).name]
        else:
            names = [name for card in self.gateway.models(key) for name in _names(card, (card.id,))]
        return {"model_stats": [self._statistics_of(name) for name in names]}

    def index(self, *, ready: bool = False, key: str | None = None) -> list[dict[str, str]]:
        """Return the models that are served, or may be again; with `ready`, only those that answer."""
        return [
            {
                "name": name,
                "version": VERSION,
                "state": "READY" if card.ready else "UNAVAILABLE",
                "reason": "unloaded" if card.unloaded else "" if card.ready else "not ready",
            }
            for card in self.gateway.models(key)
            if card.ready or not ready
            for name in _names(card, (card.id, *card.settings.aliases))
        ]

    async def load(self, model: str, parameters: dict[str, Any] | None = None) -> str:
        """Load a model and wait until it answers; return its public name.

        Raises:
            GatewayError: it could not be loaded, or `parameters` want it with other files or configuration.
        """
        if parameters:
            raise InvalidRequestError(f"The parameter {min(parameters)[:100]!r} is not supported.")
        await self.gateway.upstream.load(model, reload=False, upstream=None)
        return self.gateway.upstream.model(model).id

    async def unload(self, model: str) -> str:
        """Unload a model and wait until it is gone; return its public name.

        Raises:
            GatewayError: it could not be unloaded.
        """
        await self.gateway.upstream.unload(model, upstream=None)
        return self.gateway.upstream.model(model).id

    def admission(self, key: str | None, model: str | None = None) -> Admission:
        """Return where a request for inference must find a place before it is read.

        Args:
            key: the name of the caller's key.
            model: what it is for; None: only the request tells, so it may be for a tokenizer if there is one.
        """
        tokenizes = (model is None or model.endswith(SUFFIX)) and any(
            card.settings.contract is Contract.LOGITS for card in self.gateway.models(key)
        )
        return self.gateway.tokenizing if tokenizes else self.gateway.admission

    async def infer(self, request: InferRequest, record: RequestRecord, receive: Receive) -> list[Tensor]:
        """Answer a request for inference; return the outputs that it asks for.

        Args:
            request: a client's; its shapes fit its elements.
            record: the record of the HTTP request or gRPC call.
            receive: reports the client's hang-up, as an ASGI channel; the body was read.

        Raises:
            GatewayError: any question could not be answered; of several, the message names the row.
        """
        if request.timeout_us:
            limit = asyncio.get_running_loop().time() + request.timeout_us / 1e6
            record.deadline = min(record.deadline, limit)
        running = RunningRequest(self.gateway, record)
        await running.reached(receive)
        found = self._find(request.model, request.version, record.key_name)
        record.model = found.card.id
        if not (found.tokenizer or _is_known(found.card)):
            await running.met(found.card.id)
            found = self._find(request.model, request.version, record.key_name)
        infer = self._infer
        if found.tokenizer:
            infer = self._tokenize
        elif self._contract(found.card) is Contract.LOGITS:
            infer = self._logits
        began, rows = time.perf_counter(), 0
        try:
            outputs, rows = await infer(found.card, request, record, running, receive)
        finally:
            self._count(found.name, rows, time.perf_counter() - began, record.queued_s or 0.0)
        return outputs

    def _count(self, model: str, rows: int, seconds: float, queued_s: float) -> None:
        """Count a request that took `seconds`; it has failed if it has no `rows`."""
        statistics = self._statistics_of(model)
        counts = statistics["inference_stats"]
        durations_s = {"success" if rows else "fail": seconds, "queue": queued_s}
        if rows:
            durations_s["compute_infer"] = seconds - queued_s
        for name, duration_s in durations_s.items():
            counts[name]["count"] += 1
            counts[name]["ns"] += int(duration_s * 1e9)
        if rows:
            statistics["last_inference"] = int(time.time() * 1000)
            statistics["inference_count"] += rows
            statistics["execution_count"] += 1

    def _statistics_of(self, model: str) -> dict[str, Any]:
        counts = {name: {"count": 0, "ns": 0} for name in _DURATIONS}
        new: dict[str, Any] = {"name": model, "version": VERSION, "last_inference": 0, "inference_count": 0}
        new |= {"execution_count": 0, "inference_stats": counts, "batch_stats": []}
        return self._statistics.setdefault(model, new)

    async def _infer(
        self,
        card: ModelCard,
        request: InferRequest,
        record: RequestRecord,
        running: RunningRequest,
        receive: Receive,
    ) -> tuple[list[Tensor], int]:
        contract, chat_format = self._contract(card), card.chat_format or ""
        most_rows = self._most_rows(card)
        questions, batch_dimension = read_questions(contract, request, chat_format, most_rows)
        await running.start(_generations(card, questions, record), receive)
        answers = [_Answer() for _ in questions]
        async for event in running:
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

    async def _logits(
        self,
        card: ModelCard,
        request: InferRequest,
        record: RequestRecord,
        running: RunningRequest,
        receive: Receive,
    ) -> tuple[list[Tensor], int]:
        if card.vocabulary is None:
            raise (
                InvalidRequestError(f"The backend of {card.id} reports no logits.", param="model_name")
                if card.ready
                else _not_reached(card)
            )
        prompts = read_prompts(request, card.vocabulary, self.gateway.settings.logits_bytes)
        generations = [
            Generation(
                request_id=record.request_id,
                model=card.id,
                prompt=TokenIds(ids),
                prompt_field=f"row {row}" if len(prompts.ids) > 1 else None,
                deadline=record.deadline,
                max_tokens=0,
                logits=True,
            )
            for row, ids in enumerate(prompts.ids)
        ]
        await running.start(generations, receive, logits_bytes=prompts.nbytes)
        logits = LogitsTensor(prompts)
        async for event in running:
            if isinstance(event, Delta) and event.logits is not None:
                logits.put(event.index, event.logits)
        await running.stop_watching()  # whoever sends the answer notices a hang-up
        return [logits.tensor()], len(prompts.ids)

    async def _tokenize(
        self,
        card: ModelCard,
        request: InferRequest,
        record: RequestRecord,
        running: RunningRequest,
        receive: Receive,
    ) -> tuple[list[Tensor], int]:
        texts = read_texts(request)

        async def tokenize() -> list[Tokens]:
            return [
                await self.gateway.upstream.tokenize(
                    Tokenization(
                        request_id=record.request_id,
                        model=card.id,
                        prompt=PlainText(text),
                        deadline=record.deadline,
                    )
                )
                for text in texts
            ]

        rows = await running.call(tokenize, receive, admission=self.gateway.tokenizing)
        return padded(request, [row.ids for row in rows], rows[0].pad or 0), len(texts)

    def _find(self, model: str, model_version: str, key: str | None) -> _Found:
        """Return what a client's name means.

        Raises:
            ModelNotFoundError: there is no such model, or version of it.
        """
        try:
            found = _Found(self.gateway.model(model, key))
        except ModelNotFoundError:
            found = self._find_tokenizer(model, key)
        card = found.card
        if model_version not in ("", VERSION):
            raise ModelNotFoundError(
                f"Request for unknown model: {card.id!r} has one version here, {VERSION}",
                param="model_version",
            )
        return found

    def _find_tokenizer(self, model: str, key: str | None) -> _Found:
        try:
            card = self.gateway.model(model.removesuffix(SUFFIX), key)
        except ModelNotFoundError:
            card = None
        if card is None or card.settings.contract is not Contract.LOGITS:
            shown = repr(model[:100])
            raise ModelNotFoundError(
                f"Request for unknown model: {shown} is not found", param="model_name"
            ) from None
        return _Found(card, tokenizer=True)

    def _signature(self, found: _Found) -> Signature:
        if found.tokenizer:
            return TOKENIZER
        contract = self._contract(found.card)
        if contract is Contract.LOGITS:
            return logits_signature(found.card.vocabulary)
        signature = SIGNATURES[contract]
        return replace(signature, max_rows=min(signature.max_rows, self._most_rows(found.card)))

    @staticmethod
    def _most_rows(card: ModelCard) -> int:
        """Return how many answers one request may ask for: clients of Triton send batches of 64."""
        return min(MAX_ROWS, card.settings.limits.n or MAX_ROWS)

    def _contract(self, card: ModelCard) -> Contract:
        if not (card.settings.contract or _is_known(card)):
            raise _not_reached(card)
        return card.settings.contract or contract_of(card.chat_format)


def _is_known(card: ModelCard) -> bool:
    """Whether what clients send to a model can be read: a Triton has told what it is, or the settings."""
    if card.settings.contract is Contract.LOGITS:
        return card.ready or card.vocabulary is not None
    return bool(card.ready or card.chat_format or card.settings.contract)


def _not_reached(card: ModelCard) -> UnavailableError:
    return UnavailableError(f"The model {card.id} has not been reached yet.", reason="not_ready")


def _names(card: ModelCard, names: Sequence[str]) -> Sequence[str]:
    """Return `names` of a model, and those of its tokenizer if clients see that, too."""
    if card.settings.contract is not Contract.LOGITS:
        return names
    return [*names, *(name + SUFFIX for name in names)]


def _generations(card: ModelCard, questions: list[Question], record: RequestRecord) -> list[Generation]:
    defaults = card.settings.defaults.of_requests()
    return [
        Generation(
            request_id=record.request_id,
            model=card.id,
            prompt=Turns(question.history.turns, question.prompt),
            prompt_field=f"row {row}" if len(questions) > 1 else None,
            deadline=record.deadline,
            max_total_tokens=question.max_total_tokens,
            **{"top_p": TOP_P, **defaults, "temperature": question.temperature},
        )
        for row, question in enumerate(questions)
    ]


def _reply(question: Question, answer: _Answer, chat_format: str) -> Reply:
    try:
        return read_reply(answer.text, answer.segments, question.history.turns, chat_format)
    except ValueError as error:
        raise UpstreamProtocolError(f"The answer cannot be read: {error}.") from None
