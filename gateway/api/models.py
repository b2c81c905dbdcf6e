"""`GET /v1/models` and `GET /v1/models/{id}`."""

import msgspec
from fastapi import APIRouter
from msgspec import Struct
from starlette.responses import Response

from gateway.api.deps import GatewayDep, InferenceKey
from gateway.api.openapi import whole
from gateway.upstream import ModelCard

router = APIRouter(dependencies=[InferenceKey])


class Model(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A served model. `max_model_len` (in tokens), `ready` and `unloaded` are our extensions."""

    id: str
    object: str
    created: int
    owned_by: str
    ready: bool
    max_model_len: int | None = None
    unloaded: bool = False


class ModelList(Struct, frozen=True):
    """All served models."""

    object: str
    data: list[Model]


@router.get("/v1/models", response_class=Response, responses=whole(ModelList))
async def list_models(gateway: GatewayDep) -> Response:
    """List the models that are meant to be served, ready or not."""
    return _json(ModelList("list", [model_document(card) for card in gateway.upstream.models()]))


@router.get("/v1/models/{model_id:path}", response_class=Response, responses=whole(Model))
async def get_model(model_id: str, gateway: GatewayDep) -> Response:
    """Describe one model; ids may hold slashes."""
    return _json(model_document(gateway.upstream.model(model_id)))


def model_document(card: ModelCard) -> Model:
    """Return what clients are told of a model."""
    return Model(
        id=card.id,
        object="model",
        created=card.created,
        owned_by="tritongate",
        ready=card.ready,
        max_model_len=card.max_context,
        unloaded=card.unloaded,
    )


def _json(document: Struct) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
