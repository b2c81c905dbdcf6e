"""Checks a request before it costs anything."""

from triton_models.engine.sampling import TOP_LOGPROBS_LIMIT
from triton_models.engine.sequence import Request
from triton_models.errors import InvalidRequestError, PromptTooLongError


def check_request(request: Request, *, max_context: int, vocabulary: int) -> None:
    """Refuse a request that the engine could never finish.

    Raises:
        PromptTooLongError: prompt and answer together exceed `max_context` tokens.
        InvalidRequestError: an empty prompt, a token id outside the vocabulary, or `prompt_logprobs` out of
            range.
    """
    sampling = request.sampling
    length = len(request.prompt_ids)
    if length == 0:
        raise InvalidRequestError("the prompt has no tokens")
    if length > max_context - 1:
        raise PromptTooLongError(
            f"the prompt has {length} tokens; the context is {max_context}, one for the answer"
        )
    if sampling.max_tokens is not None and length + sampling.max_tokens > max_context:
        raise PromptTooLongError(
            f"the prompt has {length} tokens and max_tokens is {sampling.max_tokens}:"
            f" together {length + sampling.max_tokens}, and the context is {max_context}"
        )
    if not 0 <= (request.prompt_logprobs or 0) <= TOP_LOGPROBS_LIMIT:
        raise InvalidRequestError(
            f"prompt_logprobs must be 0 to {TOP_LOGPROBS_LIMIT}, not {request.prompt_logprobs}"
        )
    ids = {
        "prompt": request.prompt_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
    }
    for name, values in ids.items():
        if values and not (min(values) >= 0 and max(values) < vocabulary):
            raise InvalidRequestError(f"{name} has an id outside the vocabulary of {vocabulary}")
