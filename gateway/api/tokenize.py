"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`: a served model's own tokenizer."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.deps import ExchangeDep, FlightDep, GatewayDep, InferenceKey, JsonBody, ReadingDep
from gateway.api.openapi import body_of, whole
from gateway.errors import InvalidRequestError, UnavailableError
from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.openai.answer import encode
from gateway.openai.tokenize_request import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    read_detokenize_request,
    read_tokenize_request,
    tokenize_answer,
    tokenizer_info,
)
from gateway.resources import Gateway
from gateway.tokenization import Tokens

router = APIRouter(dependencies=[InferenceKey])

_RETRY_AFTER_S = 1


class Tokenizing:
    """Runs one request on a model's tokenizer."""

    def __init__(self, request: Request, gateway: Gateway, exchange: Exchange, flight: Flight) -> None:
        self._request = request
        self._gateway = gateway
        self._exchange = exchange
        self._flight = flight

    async def ask(self, asked: TokenizeRequest | DetokenizeRequest) -> Tokens:
        """Return the tokenizer's answer.

        Raises:
            GatewayError: there is none; `param` names a field of `asked`.
        """
        exchange, gateway = self._exchange, self._gateway
        gateway.upstream.model(asked.model)
        exchange.model = asked.model
        request = asked.tokenization(request_id=exchange.request_id, deadline=exchange.deadline)
        try:
            return await self._flight.call(
                lambda: gateway.upstream.tokenize(request),
                self._request.receive,
                admission=gateway.tokenizing,
            )
        except InvalidRequestError as error:
            raise type(error)(error.message, param=error.param or asked.subject) from None


async def _tokenizing(
    request: Request, gateway: GatewayDep, exchange: ExchangeDep, flight: FlightDep
) -> Tokenizing:
    return Tokenizing(request, gateway, exchange, flight)


TokenizingDep = Annotated[Tokenizing, Depends(_tokenizing)]


@router.post(
    "/tokenize",
    response_class=Response,
    openapi_extra=body_of(TokenizeRequest),
    responses=whole(TokenizeAnswer),
)
async def tokenize(
    body: JsonBody, reading: ReadingDep, gateway: GatewayDep, tokenizing: TokenizingDep
) -> Response:
    """Return the ids of a text, or of a conversation as the model would be given it."""
    asked = read_tokenize_request(body, reading)
    tokens = await tokenizing.ask(asked)
    answer = await tokenize_answer(tokens, gateway.upstream.model(asked.model).max_context)
    return Response(encode(answer), media_type="application/json")


@router.post(
    "/detokenize",
    response_class=Response,
    openapi_extra=body_of(DetokenizeRequest),
    responses=whole(DetokenizeAnswer),
)
async def detokenize(body: JsonBody, reading: ReadingDep, tokenizing: TokenizingDep) -> Response:
    """Return the text of a model's token ids."""
    tokens = await tokenizing.ask(read_detokenize_request(body, reading))
    return Response(encode(DetokenizeAnswer(tokens.text)), media_type="application/json")


@router.get("/tokenizer_info", response_class=Response, responses=whole(TokenizerInfo))
async def describe_tokenizer(
    reading: ReadingDep, gateway: GatewayDep, exchange: ExchangeDep, model: str | None = None
) -> Response:
    """Describe a model's tokenizer; `model` may be left out where one is served."""
    name = model or reading.model
    if name is None:
        raise InvalidRequestError("Several models are served: name one, as ?model=...", param="model")
    card = gateway.upstream.model(name)
    exchange.model = card.id
    if card.chat_format is None:
        raise UnavailableError(f"The model {card.id} has not been reached yet.", retry_after_s=_RETRY_AFTER_S)
    info = tokenizer_info(card.chat_format, card.max_context)
    return Response(encode(info), media_type="application/json")
