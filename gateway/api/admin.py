"""`POST /v1/models/{id}/load` and `/unload`: for the gateway's operators."""

import re
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gateway.api.deps import AdminKey, ExchangeDep, GatewayDep, OptionalBody, OwnSite
from gateway.api.models import Model, model_document
from gateway.api.openapi import body_of, whole
from gateway.errors import InvalidRequestError
from gateway.openai.document import read_optional_object, validate
from gateway.resources import Gateway
from gateway.upstream import EntriesChanged

router = APIRouter(dependencies=[AdminKey, OwnSite])

_NAME_LIMIT = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


class UnloadRequest(BaseModel):
    """Which Triton. The body may be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: str | None = Field(None, description="address of one Triton; absent: all that have the model")


class LoadRequest(UnloadRequest):
    """How to load."""

    reload: bool = Field(default=False, description="unload first what is loaded")


class Change(msgspec.Struct, frozen=True):
    """The entries loaded or unloaded on one Triton, in this order; none if there was nothing to do."""

    upstream: str
    entries: list[str]


class ModelChange(msgspec.Struct, frozen=True):
    """The model as it is now, and what was done."""

    model: Model
    changes: list[Change]


async def _model_name(model_id: str) -> str:
    if len(model_id) > _NAME_LIMIT or not _NAME.fullmatch(model_id):
        raise InvalidRequestError("This cannot be a model's id.", param="model_id")
    return model_id


ModelName = Annotated[str, Depends(_model_name)]


@router.post(
    "/v1/models/{model_id:path}/load",
    response_class=Response,
    openapi_extra=body_of(LoadRequest, required=False),
    responses=whole(ModelChange),
)
async def load_model(
    model_id: ModelName, body: OptionalBody, gateway: GatewayDep, exchange: ExchangeDep
) -> Response:
    """Load a model and wait until it answers; a loaded one stays as it is, unless a reload is asked for."""
    asked = validate(LoadRequest, read_optional_object(body))
    changes = await gateway.upstream.load(model_id, reload=asked.reload, upstream=asked.upstream)
    exchange.model = model_id
    return _answer(gateway, model_id, changes)


@router.post(
    "/v1/models/{model_id:path}/unload",
    response_class=Response,
    openapi_extra=body_of(UnloadRequest, required=False),
    responses=whole(ModelChange),
)
async def unload_model(
    model_id: ModelName, body: OptionalBody, gateway: GatewayDep, exchange: ExchangeDep
) -> Response:
    """Unload a model and wait until its requests in flight have ended and it is gone."""
    asked = validate(UnloadRequest, read_optional_object(body))
    changes = await gateway.upstream.unload(model_id, upstream=asked.upstream)
    exchange.model = model_id
    return _answer(gateway, model_id, changes)


def _answer(gateway: Gateway, model_id: str, changes: list[EntriesChanged]) -> Response:
    document = ModelChange(
        model=model_document(gateway.upstream.model(model_id)),
        changes=[Change(change.upstream, list(change.entries)) for change in changes],
    )
    return Response(msgspec.json.encode(document), media_type="application/json")
