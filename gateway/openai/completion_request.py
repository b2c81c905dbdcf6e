"""`POST /v1/completions`: text, or token ids, to be continued as they stand."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from gateway.generation import Generation, PlainText, TokenIds
from gateway.openai import generation_request
from gateway.openai.document import read_object, validate, without_neutral
from gateway.openai.generation_request import (
    AnyCompletionRequest,
    Items,
    TokenId,
    without_neutral_options,
)
from gateway.openai.structured import StructuredRequest

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        **generation_request.NOT_YET,
        "add_special_tokens": True,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "prompt_embeds": None,
        "prompt_logprobs": None,
        "response_format": {"type": "text"},
        "suffix": None,
    }
)
"""Real parameters that are not supported yet, each with the value that asks for nothing."""


def _one_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise PydanticCustomError(
            "one_prompt",
            "several prompts in one request are not supported yet; give one string or one list of ids",
        )
    return prompt


class CompletionRequest(AnyCompletionRequest, StructuredRequest):
    """A text completion request. Null means absent everywhere."""

    prompt: Annotated[
        str | Annotated[Items[TokenId], Field(min_length=1)],
        BeforeValidator(_one_prompt),
        Field(description="one text, or the ids of one"),
    ]
    return_token_ids: Annotated[
        bool | None, Field(description="report the ids of the prompt and of the answer")
    ] = None

    def prompt_asked(self) -> PlainText | TokenIds:
        """Return the text or the ids."""
        return PlainText(self.prompt) if isinstance(self.prompt, str) else TokenIds(tuple(self.prompt))

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return what is asked of the upstream."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(asked, return_token_ids=bool(self.return_token_ids))


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
