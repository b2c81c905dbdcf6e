"""The parameters shared by all routes that generate text: their names, ranges and defaults.

Source: OpenAI's API reference; the extensions are vLLM's sampling parameters, spelled as there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, cached_property
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Generation, Prompt
from gateway.openai.document import without_neutral_in
from wire.limits import (
    INT64_MAX,
    LOGIT_BIAS_LIMIT,
    PRIORITY_LIMIT,
    STOP_IDS_LIMIT,
    STOP_LENGTH_LIMIT,
)

NOT_YET: Mapping[str, Any] = MappingProxyType(
    {
        "store": False,
    }
)
"""Parameters of the API that are not supported yet, each with the value that has no effect."""

STREAM_OPTIONS_NOT_YET: Mapping[str, Any] = MappingProxyType({"include_obfuscation": False})

MESSAGES_LIMIT = 16_384
"""Messages, or items, of one conversation: even an empty one costs the event loop time."""

ID_LIMIT = 2**32
"""Larger than any id of any vocabulary."""


def _token_id(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(ID_LIMIT))):
        raise PydanticCustomError("token_id", "the keys are token ids, decimal numbers")
    if text != str(int(text)):
        # "05" and "5" would be the same id twice, and one of them would be ignored.
        raise PydanticCustomError("token_id", "the keys are token ids, without zeros in front")
    return text


def _few_stops(stop: str | list[str]) -> str | list[str]:
    if isinstance(stop, list) and len(stop) > 4:  # noqa: PLR2004 - OpenAI's limit
        raise PydanticCustomError("too_many_stops", "at most 4 stop strings are allowed")
    return stop


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""Validated up to the first fault: a body has room for millions, and only one is reported."""


def at_most(limit: int) -> BeforeValidator:
    """Refuse a larger object or list before validating its items: a body has room for many thousands."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise PydanticCustomError("too_many", f"at most {limit} entries are allowed")
        return value

    return BeforeValidator(check)


NonEmpty = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH_LIMIT)]
TokenId = Annotated[int, Field(ge=0, lt=ID_LIMIT)]
TokenKey = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenBound = Annotated[int, Field(ge=1, le=INT64_MAX)]


@cache
def _keys_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Strict(BaseModel):
    """An object of a request: no type conversion, and no keys but the declared ones."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        """Keep only one unknown key: pydantic reports all of them, and a body has room for half a million."""
        if not isinstance(value, dict):
            return value
        known = _keys_of(cls)
        unknown = next((name for name in value if name not in known), None)
        if unknown is None:
            return value
        return {name: value[name] for name in (*known, unknown) if name in value}


class AnyStreamOptions(Strict):
    """The stream options common to all routes: none is supported yet."""


class StreamOptions(AnyStreamOptions):
    """Which token counts a stream reports."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _included(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("usage", "continuous_usage_stats needs include_usage=true")
        return self


class GenerationRequest(Strict, ABC):
    """The shared part. Null means absent everywhere."""

    model: NonEmpty
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Annotated[StopString | Items[StopString], AfterValidator(_few_stops)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias] | None, at_most(LOGIT_BIAS_LIMIT)] = None
    stream: bool | None = None
    stream_options: AnyStreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX, description="-1 and 0 keep every token")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=STOP_IDS_LIMIT)] | None = None
    include_stop_str_in_output: Annotated[
        bool | None,
        Field(description="what stopped the answer is its end: a stop string, a stop token's text"),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="false: special tokens of the answer are in its text, by their names")
    ] = None
    priority: Annotated[
        int | None,
        Field(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT, description="place in the engine's queue, lower first"),
    ] = None

    user: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None
    safety_identifier: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None
    prompt_cache_key: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None
    metadata: Annotated[
        dict[str, str] | None, at_most(16), Field(description="bookkeeping: accepted, not used")
    ] = None
    service_tier: Annotated[str | None, Field(description="bookkeeping: accepted, not used")] = None

    @property
    def choices(self) -> int:
        """The number of answers requested."""
        return 1

    def check_choices(self, limit: int) -> None:
        """Refuse more answers than `limit`.

        Raises:
            InvalidRequestError: with the field that asks for them in `param`.
        """
        if self.choices > limit:
            raise InvalidRequestError(f"n is {self.choices}, and this gateway allows {limit}.", param="n")

    @property
    @abstractmethod
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""

    @abstractmethod
    def prompt_asked(self) -> Prompt:
        """Build the prompt; `continued` caches it."""

    @cached_property
    def continued(self) -> Prompt:
        """The prompt, built once: a long conversation takes time."""
        return self.prompt_asked()

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return the generation to run; subclasses add what their route supports."""
        return Generation(
            request_id=request_id,
            model=self.model,
            prompt=self.continued,
            deadline=deadline,
            max_tokens=self.token_bound,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=max(self.top_k or 0, 0),
            min_p=float(self.min_p or 0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else list(self.stop or ()),
            stop_token_ids=list(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            show_special=self.skip_special_tokens is False,
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            stream=bool(self.stream),
            priority=self.priority or 0,
        )

    def generations(self, *, request_id: str, deadline: float) -> list[Generation]:
        """Return the generations to run, one per prompt; most routes have one prompt."""
        return [self.generation(request_id=request_id, deadline=deadline)]

    def check_combinations(self) -> None:
        """Refuse parameters that are valid alone but not together.

        Raises:
            InvalidRequestError: with the field in `param`.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
        if self.skip_special_tokens is False:
            prompt = self.continued
            if isinstance(prompt, Conversation) and prompt.offer is not None:
                raise InvalidRequestError(
                    "skip_special_tokens=false excludes tools: special tokens tell their calls from text.",
                    param="skip_special_tokens",
                )
        bound = self.token_bound
        if bound is not None and (self.min_tokens or 0) > bound:
            raise InvalidRequestError(
                f"min_tokens is more than the bound of {bound} new tokens.", param="min_tokens"
            )


def without_neutral_options(document: dict[str, Any]) -> dict[str, Any]:
    """Drop options without effect from the document's `stream_options`, if it has any.

    Raises:
        InvalidRequestError: one of them is not supported yet.
    """
    return without_neutral_in(document, "stream_options", STREAM_OPTIONS_NOT_YET)
