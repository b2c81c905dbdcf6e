"""The dependencies that routes declare.

All of these are coroutines, though they await nothing: FastAPI would run plain functions in a thread.
"""

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from gateway.errors import ClientGoneError, PermissionDeniedError, UnsupportedMediaTypeError
from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.openai.document import Reading
from gateway.resources import Gateway
from gateway.setting_types import Scope, is_loopback


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


async def _own_site(request: Request, gateway: GatewayDep) -> None:
    """Keep out web pages of other sites: these requests need nothing that a browser asks about first."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        raise PermissionDeniedError("Web pages of other sites may not send this request.")
    if not gateway.settings.api_keys and is_loopback(gateway.settings.host):
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not is_loopback(name):
            raise PermissionDeniedError("This request must be addressed to this machine by a loopback name.")


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


async def _optional_body(request: Request, gateway: GatewayDep, exchange: ExchangeDep) -> bytes:
    return await read_body(request, gateway, exchange)


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

OwnSite = Depends(_own_site)
"""For routes that change something without a body: a page of another site in a browser must not."""

MetricsKey = Depends(_metrics)
"""For `/metrics`: any key, where the settings ask for one."""

JsonBody = Annotated[bytes, Depends(_json_body)]
OptionalBody = Annotated[bytes, Depends(_optional_body)]
"""Of whatever content type; perhaps empty."""
ReadingDep = Annotated[Reading, Depends(_reading)]
"""How the body is read; what it ignores, the answer names."""
FlightDep = Annotated[Flight, Depends(_flight)]
