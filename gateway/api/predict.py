"""`POST /MutilBackendService/Predict` (its clients spell it so): a model's entry `M`, as tensors."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.deps import ExchangeDep, FlightDep, GatewayDep, InferenceKey, JsonBody
from gateway.api.openapi import body_of, whole
from gateway.errors import ModelNotFoundError
from gateway.kserve import PredictAnswer, PredictRequest, read_predict_request, write_predict_answer

router = APIRouter(dependencies=[InferenceKey])


@router.post(
    "/MutilBackendService/Predict",
    response_class=Response,
    openapi_extra=body_of(PredictRequest),
    responses=whole(PredictAnswer),
)
async def predict(
    request: Request, body: JsonBody, gateway: GatewayDep, exchange: ExchangeDep, flight: FlightDep
) -> Response:
    """Pass a ModelInferRequest in protobuf's JSON to the request/response entry of a served model."""
    asked = read_predict_request(body)
    try:
        # Served models only: no engine or tokenizer entry, and nothing else that the Triton may have.
        gateway.upstream.model(asked.model_name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.message, param="model_name") from None
    exchange.model = asked.model_name
    prediction = asked.prediction(request_id=exchange.request_id, deadline=exchange.deadline)
    answer = await flight.call(lambda: gateway.upstream.predict(prediction), request.receive)
    return Response(write_predict_answer(asked, answer), media_type="application/json")
