"""`/health`, `/health/ready`, `/metrics` and `/version`: for the gateway's operators."""

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from gateway.api.deps import GatewayDep, MetricsKey
from gateway.drain import Phase, shutting_down
from gateway.errors import UnavailableError
from gateway.metrics import CONTENT_TYPE
from gateway.version import version

router = APIRouter()

_RETRY_AFTER_S = 1


@router.get("/health")
async def health() -> dict[str, str]:
    """Tell that the process is alive; nothing else is checked."""
    return {"status": "ok"}


@router.get("/health/ready", response_class=JSONResponse)
async def ready(gateway: GatewayDep) -> Response:
    """Tell whether requests will be served: every model meant to be loaded answers, and no drain runs."""
    if gateway.drain.phase is not Phase.SERVING:
        raise shutting_down()
    missing = gateway.not_ready()
    if missing is None:
        raise UnavailableError("No model was found on any Triton.", retry_after_s=_RETRY_AFTER_S)
    if missing:
        raise UnavailableError(f"Not ready: {', '.join(missing)}.", retry_after_s=_RETRY_AFTER_S)
    models = [card.id for card in gateway.upstream.models() if card.ready]
    return JSONResponse({"status": "ready", "models": models})


@router.get("/metrics", response_class=Response, dependencies=[MetricsKey])
async def metrics(gateway: GatewayDep) -> Response:
    """Return what Prometheus reads."""
    return Response(await gateway.exposition(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Return the gateway's version."""
    return {"version": version()}
