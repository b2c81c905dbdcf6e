"""The dependencies that routes declare.

All of these are coroutines, though they await nothing: FastAPI would run plain functions in a thread.
"""

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from gateway.errors import ClientGoneError, UnsupportedMediaTypeError
from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.openai.document import Reading
from gateway.resources import Gateway
from gateway.setting_types import Scope


async def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.state.exchange
    return exchange


GatewayDep = Annotated[Gateway, Depends(_gateway)]
ExchangeDep = Annotated[Exchange, Depends(_exchange)]


async def _inference(request: Request, gateway: GatewayDep, exchange: ExchangeDep) -> None:
    exchange.key_name = gateway.keyring.authorize(request.headers.get("authorization"), Scope.INFERENCE)


async def _metrics(request: Request, gateway: GatewayDep, exchange: ExchangeDep) -> None:
    if gateway.settings.metrics_need_key:
        exchange.key_name = gateway.keyring.authorize(request.headers.get("authorization"), None)


async def _admin(request: Request, gateway: GatewayDep, exchange: ExchangeDep) -> None:
    exchange.key_name = gateway.authorize_admin(request.headers.get("authorization"))


async def _json_body(request: Request, gateway: GatewayDep, exchange: ExchangeDep) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError("The body must be declared as Content-Type: application/json.")
    return await read_body(request, gateway, exchange)


async def read_body(request: Request, gateway: Gateway, exchange: Exchange) -> bytes:
    """Read the whole body, of whatever type.

    Raises:
        ClientGoneError: the client hung up before its end.
        GatewayError: it exceeds a limit.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError("The client hung up while it sent its body.") from None
    if gateway.settings.log_prompts:
        exchange.body = body
    return body


async def _reading(gateway: GatewayDep, exchange: ExchangeDep) -> Reading:
    served = gateway.upstream.models()
    return Reading(
        strict=gateway.settings.strict,
        model=served[0].id if len(served) == 1 else None,
        ignored=exchange.ignored,
    )


async def _flight(gateway: GatewayDep, exchange: ExchangeDep) -> Flight:
    return Flight(gateway, exchange)


InferenceKey = Depends(_inference)
"""For routers: the caller needs a key with the scope `inference`."""

AdminKey = Depends(_admin)
"""For routers: the caller needs a key with the scope `admin`; if there are no keys, everybody has it."""

MetricsKey = Depends(_metrics)
"""For `/metrics`: any key, where the settings ask for one."""

JsonBody = Annotated[bytes, Depends(_json_body)]
ReadingDep = Annotated[Reading, Depends(_reading)]
"""How the body is read; what it ignores, the answer names."""
FlightDep = Annotated[Flight, Depends(_flight)]
