"""The parameters shared by all routes that generate text: their names, ranges and defaults.

Source: OpenAI's API reference; the extensions are vLLM's sampling parameters, spelled as there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, cached_property
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Generation, Prompt
from gateway.openai.document import Reading
from wire.limits import (
    ALLOWED_IDS_LIMIT,
    BAD_WORD_LENGTH_LIMIT,
    BAD_WORDS_LIMIT,
    INT64_MAX,
    LOGIT_BIAS_LIMIT,
    PRIORITY_LIMIT,
    STOP_IDS_LIMIT,
    STOP_LENGTH_LIMIT,
    STOPS_LIMIT,
)

UNSUPPORTED: Mapping[str, Any] = MappingProxyType(
    {
        "detokenize": True,
        "length_penalty": 1.0,
        "logits_processors": None,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
    }
)
"""Parameters that would change the answer and are not supported, each with the value that has no effect.

All but OpenAI's own are vLLM's."""

MESSAGES_LIMIT = 16_384
"""Messages, or items, of one conversation: even an empty one costs the event loop time."""

IGNORED_PER_OBJECT = 16
"""Unknown keys of one object that are looked at."""

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
    if isinstance(stop, list) and len(stop) > STOPS_LIMIT:
        raise PydanticCustomError("too_many_stops", f"at most {STOPS_LIMIT} stop strings are allowed")
    return stop


def _not_nothing(kept: int | None) -> int | None:
    if kept == 0:
        raise PydanticCustomError("nothing", "nothing would be left of the prompt; -1 keeps what fits")
    return kept


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
BadWord = Annotated[str, Field(min_length=1, max_length=BAD_WORD_LENGTH_LIMIT)]
TokenId = Annotated[int, Field(ge=0, lt=ID_LIMIT)]
TokenKey = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenBound = Annotated[int, Field(ge=1, le=INT64_MAX)]


@cache
def _keys_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Strict(BaseModel):
    """An object of a request: its declared keys are validated without type conversion, others are ignored.

    Validated with a `Reading` as context, it notes there what it ignores; a strict one, or none, refuses it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    place: ClassVar[str] = ""
    """Where such an object stands in a request, without indices."""

    @model_validator(mode="before")
    @classmethod
    def _without_unknown(cls, value: Any, info: ValidationInfo) -> Any:
        """Remove the unknown keys; one stays for pydantic to refuse: a body has room for a million."""
        if not isinstance(value, dict):
            return value
        known = _keys_of(cls)
        if value.keys() <= known:
            return value
        # Null, false and what is empty ask for nothing.
        unknown = (name for name, content in value.items() if name not in known and content)
        reading = info.context
        if not isinstance(reading, Reading) or reading.strict:
            return {name: value[name] for name in (*known, *islice(unknown, 1)) if name in value}
        for name in islice(unknown, IGNORED_PER_OBJECT):
            reading.ignore(f"{cls.place}.{name}" if cls.place else name)
        return {name: value[name] for name in known if name in value}


class AnyStreamOptions(Strict):
    """The stream options common to all routes: none changes an answer."""

    place: ClassVar[str] = "stream_options"


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
    allowed_token_ids: Annotated[
        Annotated[Items[TokenId], Field(min_length=1), at_most(ALLOWED_IDS_LIMIT)] | None,
        Field(description="only these are sampled; stop ids are no exception"),
    ] = None
    bad_words: Annotated[
        Annotated[Items[BadWord], at_most(BAD_WORDS_LIMIT)] | None,
        Field(description="not part of the answer, in the tokens that the tokenizer makes of them"),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1, le=INT64_MAX, description="keep only the prompt's last ones; -1: what the context holds"
        ),
        AfterValidator(_not_nothing),
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
            allowed_token_ids=None if self.allowed_token_ids is None else list(self.allowed_token_ids),
            bad_words=list(self.bad_words or ()),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
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
