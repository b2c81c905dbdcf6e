"""Answering a parsed request, whole or as a stream of events: one implementation for every route."""

import logging
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Depends, Request
from starlette.responses import Response

from gateway.api.deps import ExchangeDep, FlightDep, GatewayDep
from gateway.context import check_context, check_prompt_logprobs
from gateway.errors import ClientGoneError, GatewayError, InternalError
from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.openai.answer import Answer, StreamWriter, encode
from gateway.openai.generation_request import GenerationRequest
from gateway.openai.sse import EventStream
from gateway.resources import Gateway

_log = logging.getLogger(__name__)


class Answering:
    """Runs one request's generation and sends the answer."""

    def __init__(self, request: Request, gateway: Gateway, exchange: Exchange, flight: Flight) -> None:
        self._request = request
        self._gateway = gateway
        self._exchange = exchange
        self._flight = flight

    async def respond(self, asked: GenerationRequest, answer: Answer) -> Response:
        """Return the answer to `asked`, as `answer` writes it.

        Raises:
            GatewayError: before the first byte; later errors become part of the stream.
        """
        exchange, flight = self._exchange, self._flight
        card = self._gateway.upstream.model(asked.model)
        exchange.model = asked.model
        exchange.stream = bool(asked.stream)
        asked.check_choices(self._gateway.settings.max_choices)
        generations = asked.generations(request_id=exchange.request_id, deadline=exchange.deadline)
        check_context(generations, card)
        accepted = await flight.start(generations, self._request.receive)
        check_prompt_logprobs(generations, accepted)
        if not asked.stream:
            document = await answer.whole(accepted, flight)
            return Response(encode(document), media_type="application/json")
        await flight.stop_watching()  # from here on the event stream watches
        settings = self._gateway.settings
        return EventStream(
            _events(flight, answer.stream(accepted), exchange),
            on_gone=lambda: flight.end(ClientGoneError("The client hung up.")),
            ping_interval_s=settings.ping_interval_s,
            send_timeout_s=settings.send_timeout_s,
            send_body=exchange.send_body,
        )


async def _answering(
    request: Request, gateway: GatewayDep, exchange: ExchangeDep, flight: FlightDep
) -> Answering:
    return Answering(request, gateway, exchange, flight)


AnsweringDep = Annotated[Answering, Depends(_answering)]


async def _events(flight: Flight, writer: StreamWriter, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """Write the stream, and always its end: status 200 was sent already."""
    try:
        if written := writer.begin():
            yield written
        async for event in flight:
            if written := writer.write(event):
                yield written
        last = writer.close()
    except GatewayError as error:
        exchange.fail(error)
        last = writer.fail(error)
    except Exception:  # noqa: BLE001 - the stream's outermost frame: the client must get an end
        _log.exception("a stream failed unexpectedly")
        failure = InternalError("The gateway failed; its log says why under this request's id.")
        exchange.fail(failure)
        last = writer.fail(failure)
    yield last
