"""What requests for completions take, of messages or of a text, beside what every request for text does."""

from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from gateway.errors import InvalidRequestError
from gateway.generation import Generation
from gateway.openai.generation_request import GenerationRequest, StreamOptions, TokenBound
from wire.limits import ANSWERS_LIMIT, TOP_LOGPROBS_LIMIT


class AnyCompletionRequest(GenerationRequest):
    """What both completion routes take. Null means absent everywhere."""

    n: Annotated[int, Field(ge=1, le=ANSWERS_LIMIT)] | None = None
    max_tokens: TokenBound | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[
        bool | None, Field(description="report the ids of the prompt and of the answer")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Field(description="log-probabilities name each token by its id, as token_id:N")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=TOP_LOGPROBS_LIMIT,
            description="alternatives reported beside each token of the prompt; not in a stream",
        ),
    ] = None

    @property
    def choices(self) -> int:
        """The number of answers wanted."""
        return self.n or 1

    @property
    def token_bound(self) -> int | None:
        """The bound on new tokens that the client gave."""
        return self.max_tokens

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return what is asked of the upstream."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(
            asked,
            n=self.n or 1,
            return_token_ids=bool(self.return_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            prompt_ranks=self.prompt_logprobs is not None,
        )

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        super().check_combinations()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs exclude stream=true.", param="prompt_logprobs")
