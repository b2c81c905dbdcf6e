"""`POST /v1/completions`: texts, or lists of token ids, to be continued exactly as given."""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag

from gateway.errors import InvalidRequestError
from gateway.generation import Generation, PlainText, TokenIds
from gateway.openai import generation_request
from gateway.openai.any_completion_request import AnyCompletionRequest
from gateway.openai.document import read_object, validate, without_neutral
from gateway.openai.generation_request import (
    Items,
    TokenId,
    at_most,
    without_neutral_options,
)
from gateway.openai.structured import StructuredRequest
from wire.limits import IDS_LIMIT, INT64_MAX

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        **generation_request.NOT_YET,
        "add_special_tokens": True,
        "best_of": 1,
        "prompt_embeds": None,
        "response_format": {"type": "text"},
        "suffix": None,
    }
)
"""Parameters of the API that are not supported yet, each with the value that has no effect."""

PROMPTS_LIMIT = 128
"""Prompts in one request; a setting limits the answers to all of them."""


def _kind(prompt: Any) -> str:
    """Return the kind of `prompt`, decided by its first item, so that errors are about the other items."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Ids = Annotated[Items[TokenId], Field(min_length=1), at_most(IDS_LIMIT)]
Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Items[str], Field(max_length=PROMPTS_LIMIT), Tag("texts")]
    | Annotated[Items[Ids], Field(max_length=PROMPTS_LIMIT), Tag("lists")],
    Discriminator(_kind),
]


class CompletionRequest(AnyCompletionRequest, StructuredRequest):
    """A text completion request. Null means absent everywhere."""

    prompt: Annotated[Prompts, Field(description="one text, the ids of one, or a list of either")]
    max_tokens: Annotated[
        int | None, Field(ge=0, le=INT64_MAX, description="0 only with echo: the prompt and nothing else")
    ] = None
    echo: Annotated[bool | None, Field(description="each answer's text begins with the prompt's")] = None
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=5, description="alternatives reported beside each token of the answer and of an echo"),
    ] = None

    @cached_property
    def prompts(self) -> tuple[PlainText | TokenIds, ...]:
        """The prompts, at least one, built once: a body has room for millions of ids."""
        if isinstance(self.prompt, str):
            return (PlainText(self.prompt),)
        if isinstance(self.prompt[0], int):
            return (TokenIds(tuple(each for each in self.prompt if isinstance(each, int))),)
        return tuple(
            PlainText(each) if isinstance(each, str) else TokenIds(tuple(each))
            for each in self.prompt
            if not isinstance(each, int)
        )

    @property
    def choices(self) -> int:
        """The number of answers requested, to all prompts together."""
        return len(self.prompts) * (self.n or 1)

    def check_choices(self, limit: int) -> None:
        """See `GenerationRequest.check_choices`."""
        prompts = len(self.prompts)
        if prompts > 1 and self.choices > limit:
            each = f" with {self.n} answers each" if self.n else ""
            raise InvalidRequestError(
                f"There are {prompts} prompts{each}, and this gateway allows {limit} answers in one request.",
                param="prompt",
            )
        super().check_choices(limit)

    def prompt_asked(self) -> PlainText | TokenIds:
        """Return the first prompt; `generations` has them all."""
        return self.prompts[0]

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return the generation for the first prompt."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        echo = bool(self.echo)
        # Each is told as many alternatives as it asks for, of the more that are computed.
        of_prompt = (asked.prompt_logprobs, self.logprobs if echo else None)
        return replace(
            asked,
            echo=echo,
            logprobs=self.logprobs,
            prompt_logprobs=max((each for each in of_prompt if each is not None), default=None),
        )

    def generations(self, *, request_id: str, deadline: float) -> list[Generation]:
        """Return the generations to run, one per prompt."""
        asked = self.generation(request_id=request_id, deadline=deadline)
        prompts = self.prompts
        if len(prompts) == 1:
            return [asked]
        return [
            replace(asked, prompt=prompt, prompt_field=f"prompt.{place}")
            for place, prompt in enumerate(prompts)
        ]

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        super().check_combinations()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens is 0, which leaves nothing without echo.", param="max_tokens"
            )


def read_completion_request(body: bytes) -> CompletionRequest:
    """Decode and check a request body.

    Raises:
        InvalidRequestError: with the dotted path of the offending field in `param`.
    """
    document = read_object(body)
    # As many candidates as are wanted leave nothing to choose.
    not_yet = {**NOT_YET, "best_of": document.get("n") or 1}
    document = without_neutral_options(without_neutral(document, not_yet))
    request = validate(CompletionRequest, document)
    request.check_combinations()
    return request
