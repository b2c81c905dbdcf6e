"""For operators: health, metrics, version, and control of models."""

from typing import Annotated

from fastapi import Depends
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from gateway import version
from gateway.core.upstream import EntriesChanged
from gateway.errors import InvalidRequestError, UnavailableError
from gateway.http.openapi import body_of, complete
from gateway.http.record import NAME_LIMIT, Gateway, RequestRecord
from gateway.http.routes import (
    AdminKey,
    GatewayDep,
    MetricsKey,
    Model,
    OptionalBody,
    RecordDep,
    new_router,
    respond_with,
)
from gateway.limits.admission import Phase, shutting_down
from gateway.openai.document import read_optional_object, validate
from gateway.telemetry.metrics import CONTENT_TYPE

router = new_router()
admin_router = new_router(AdminKey, default_response_class=Response)


@router.get("/health")
async def health() -> dict[str, str]:
    """Tell that the process is alive; nothing else is checked."""
    return {"status": "ok"}


@router.get("/health/ready", response_class=JSONResponse)
async def ready(gateway: GatewayDep) -> Response:
    """Tell whether requests will be served, whichever process gets them.

    Every model meant to be loaded answers, each process has been ready since the start, and no drain runs.
    """
    if gateway.drain.phase is not Phase.SERVING:
        raise shutting_down()
    missing = gateway.not_ready()
    if missing is None:
        raise UnavailableError(
            "No model is known: no Triton answers, none has one, or they list none without the setting"
            " repository_key. The log says which."
        )
    shown = gateway.models(None)  # anybody may ask, also about models that are for certain keys
    if missing:
        named = ", ".join(card.id for card in shown if card.id in missing) or "a model"
        raise UnavailableError(f"Not ready: {named}.")
    if not gateway.shared.begun:
        raise UnavailableError("Not ready: other processes of this gateway are starting.")
    models = [card.id for card in shown if card.ready]
    return JSONResponse({"status": "ready", "models": models})


@router.get("/metrics", response_class=Response, dependencies=[MetricsKey])
async def metrics(gateway: GatewayDep) -> Response:
    """Return what Prometheus reads."""
    return Response(await gateway.exposition(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Return the gateway's version."""
    return {"version": version()}


class UnloadRequest(BaseModel):
    """Which Triton. The body may be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: str | None = Field(None, description="address of one Triton; absent: all that have the model")


class LoadRequest(UnloadRequest):
    """How to load."""

    reload: bool = Field(default=False, description="unload first what is loaded")


class ModelChange(Struct, frozen=True):
    """The model as it is now, and what was done."""

    model: Model
    changes: list[EntriesChanged]


async def _model_name(model_id: str) -> str:
    if len(model_id) > NAME_LIMIT:
        raise InvalidRequestError(f"A model's name has at most {NAME_LIMIT} characters.", param="model_id")
    return model_id


ModelName = Annotated[str, Depends(_model_name)]


@admin_router.post(
    "/v1/models/{model_id:path}/load",
    openapi_extra=body_of(LoadRequest, required=False),
    responses=complete(ModelChange),
)
async def load_model(
    model_id: ModelName, body: OptionalBody, gateway: GatewayDep, record: RecordDep
) -> Response:
    """Load a model and wait until it answers; a loaded one stays as it is, unless a reload is asked for."""
    request = validate(LoadRequest, read_optional_object(body))
    changes = await gateway.upstream.load(model_id, reload=request.reload, upstream=request.upstream)
    return _answer(gateway, record, model_id, changes)


@admin_router.post(
    "/v1/models/{model_id:path}/unload",
    openapi_extra=body_of(UnloadRequest, required=False),
    responses=complete(ModelChange),
)
async def unload_model(
    model_id: ModelName, body: OptionalBody, gateway: GatewayDep, record: RecordDep
) -> Response:
    """Unload a model and wait until its requests in flight have ended and it is gone."""
    request = validate(UnloadRequest, read_optional_object(body))
    changes = await gateway.upstream.unload(model_id, upstream=request.upstream)
    return _answer(gateway, record, model_id, changes)


def _answer(
    gateway: Gateway, record: RequestRecord, model_id: str, changes: list[EntriesChanged]
) -> Response:
    card = gateway.upstream.model(model_id)  # whoever controls models controls all
    record.model = card.id
    return respond_with(ModelChange(Model.of(card, model_id), changes))
