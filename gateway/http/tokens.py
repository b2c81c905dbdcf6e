"""What a model's tokenizer makes of texts and conversations: its ids, or how many there are."""

from starlette.responses import Response

from gateway.errors import InvalidRequestError, UnavailableError
from gateway.http.openapi import body_of, complete
from gateway.http.routes import (
    AnsweringDep,
    GatewayDep,
    InferenceKey,
    RecordDep,
    new_router,
    only_model,
    respond_with,
)
from gateway.openai.responses_answer import InputTokens
from gateway.openai.responses_request import InputTokensRequest
from gateway.openai.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    tokenize_answer,
    tokenizer_info,
)

router = new_router(InferenceKey, default_response_class=Response)


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=body_of(InputTokensRequest),
    responses=complete(InputTokens),
)
async def count_input_tokens(answering: AnsweringDep) -> Response:
    """Count the tokens of a response's input as the model would be given it."""
    tokens = await answering.tokens(await answering.read(InputTokensRequest, tokenizes=True))
    return respond_with(InputTokens(input_tokens=len(tokens.ids)))


@router.post(
    "/tokenize",
    openapi_extra=body_of(TokenizeRequest),
    responses=complete(TokenizeAnswer),
)
async def tokenize(gateway: GatewayDep, record: RecordDep, answering: AnsweringDep) -> Response:
    """Return the ids of a text, or of a conversation as the model would be given it."""
    request = await answering.read(TokenizeRequest, tokenizes=True)
    tokens = await answering.tokens(request)
    max_context = gateway.model(request.model, record.key_name).max_context
    return respond_with(tokenize_answer(tokens, max_context))


@router.post(
    "/detokenize",
    openapi_extra=body_of(DetokenizeRequest),
    responses=complete(DetokenizeAnswer),
)
async def detokenize(answering: AnsweringDep) -> Response:
    """Return the text of a model's token ids."""
    tokens = await answering.tokens(await answering.read(DetokenizeRequest, tokenizes=True))
    return respond_with(DetokenizeAnswer(tokens.text))


@router.get("/tokenizer_info", responses=complete(TokenizerInfo))
async def describe_tokenizer(gateway: GatewayDep, record: RecordDep, model: str | None = None) -> Response:
    """Describe a model's tokenizer; `model` may be left out where one is served."""
    name = model or only_model(gateway, record)
    if name is None:
        raise InvalidRequestError("Several models are served: name one, as ?model=...", param="model")
    card = gateway.model(name, record.key_name)
    record.model = card.id
    if card.chat_format is None and card.ready:
        raise InvalidRequestError(f"The gateway cannot describe the tokenizer of {card.id}.", param="model")
    if card.chat_format is None:
        raise UnavailableError(f"The model {card.id} has not been reached yet.", reason="not_ready")
    return respond_with(tokenizer_info(card.chat_format, card.max_context, card.vocabulary))
