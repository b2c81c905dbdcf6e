"""What every request for text takes: sampling parameters, structured output, bookkeeping.

Source: OpenAI's API reference; the extensions are vLLM's sampling parameters, spelled as there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from gateway.chat.conversation import call_rules
from gateway.core.request import Conversation, Generation, Grammar, Prompt
from gateway.errors import InvalidRequestError
from gateway.openai.document import Items, Strict, at_most, ignore
from gateway.openai.structured import ResponseFormat, StructuredRequest, format_grammar
from wire.limits import (
    ALLOWED_IDS_LIMIT,
    ANSWERS_LIMIT,
    BAD_WORD_LENGTH_LIMIT,
    BAD_WORDS_LIMIT,
    BEAMS_LIMIT,
    INT64_MAX,
    LOGIT_BIAS_LIMIT,
    PRIORITY_LIMIT,
    STOP_IDS_LIMIT,
    STOP_LENGTH_LIMIT,
    STOPS_LIMIT,
    TOP_LOGPROBS_LIMIT,
)

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


def _not_nothing(kept: int | None) -> int | None:
    if kept == 0:
        raise PydanticCustomError("nothing", "nothing would be left of the prompt; -1 keeps what fits")
    return kept


def _cache_key(key: str | None, info: ValidationInfo) -> str | None:
    """Note that nothing comes of it; a response repeats it all the same."""
    if key:
        ignore(info, "prompt_cache_key")
    return key


StopString = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH_LIMIT)]
StopStrings = Annotated[Items[StopString], Field(max_length=STOPS_LIMIT)]
BadWord = Annotated[str, Field(min_length=1, max_length=BAD_WORD_LENGTH_LIMIT)]
TokenId = Annotated[int, Field(ge=0, lt=ID_LIMIT)]
TokenKey = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenBound = Annotated[int, Field(ge=1, le=INT64_MAX)]

BOOKKEEPING = Field(description="bookkeeping: accepted, not used")


class AnyStreamOptions(Strict, place="stream_options"):
    """The stream options common to all routes: none changes an answer."""

    @property
    def ask(self) -> bool:
        """Whether one of them is not at the value that asks for nothing."""
        return any(getattr(self, name) for name in type(self).model_fields)


class StreamOptions(AnyStreamOptions):
    """Which token counts a stream reports."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _included(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("usage", "continuous_usage_stats needs include_usage=true")
        return self


class GenerationRequest(StructuredRequest, ABC):
    """The shared part. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "detokenize": True,
        "ebnf": None,
        "grammar": None,
        "json_schema": None,
        "length_penalty": 1.0,
        "logits_processors": None,
        "logprob_token_ids": None,
        "prompt_embeds": None,
        "regex": None,
        "repetition_detection": None,
        "spaces_between_special_tokens": True,
        "truncation_side": "left",
        "use_beam_search": False,
    }
    refusals: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("ebnf", "grammar", "json_schema", "regex"),  # of other servers
        "is not supported: give structured_outputs or response_format",
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "enable_thinking": True,
        "include_reasoning": True,
        "return_mm_kwargs": True,
        "thinking_token_budget": -1,
        "verbosity": "medium",
    }
    subject: ClassVar[str] = "messages"
    """The name of the field with what is continued."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float | None, Field(ge=0, le=1, description="0 keeps only the most likely token")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: StopString | StopStrings | None = None
    logit_bias: Annotated[dict[TokenKey, Bias] | None, at_most(LOGIT_BIAS_LIMIT)] = None
    stream: bool | None = None
    stream_options: AnyStreamOptions | None = None
    include_timings: Annotated[
        bool | None, Field(description="report in `usage`, as `timings`, where the request's time went")
    ] = None

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

    user: Annotated[str | None, BOOKKEEPING] = None
    safety_identifier: Annotated[str | None, BOOKKEEPING] = None
    prompt_cache_key: Annotated[
        str | None, Field(description="ignored: every cached prefix is found"), AfterValidator(_cache_key)
    ] = None
    metadata: Annotated[dict[str, str] | None, at_most(16), BOOKKEEPING] = None
    service_tier: Annotated[str | None, BOOKKEEPING] = None

    @property
    def choices(self) -> int:
        """The number of answers requested."""
        return 1

    def check_choices(self, limit: int, whose: str) -> None:
        """Refuse more answers than `limit`, which is that of `whose`, described for errors.

        Raises:
            InvalidRequestError: with the field that asks for them in `param`.
        """
        if self.choices > limit:
            raise InvalidRequestError(f"n is {self.choices}, and {whose} allows {limit}.", param="n")

    def check_bound(self, limit: int | None) -> None:
        """Refuse more new tokens than `limit`; None: there is none.

        Raises:
            InvalidRequestError: with the field that asks for them in `param`.
        """
        bound = max(self.token_bound or 0, self.min_tokens or 0)
        if limit is None or bound <= limit:
            return
        field = self.bound_field if bound == self.token_bound else "min_tokens"
        raise InvalidRequestError(f"{field} is {bound}, and this model allows {limit}.", param=field)

    @property
    @abstractmethod
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""

    @property
    def bound_field(self) -> str:
        """The name of the field with that limit."""
        return "max_tokens"

    @cached_property
    @abstractmethod
    def continued(self) -> Prompt:
        """The prompt, or the first one; built once: a long conversation takes time."""

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given, by their names in a `Generation`.

        Most have the same name and meaning in both; subclasses add what their route writes differently.
        """
        given = {
            name: value
            for name in Generation.__struct_fields__
            if name in type(self).model_fields and (value := getattr(self, name)) is not None
        }
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given | {
            "max_tokens": self.token_bound,
            "include_stop": bool(self.include_stop_str_in_output),
            "show_special": self.skip_special_tokens is False,
        }

    def generations(self, *, request_id: str, deadline: float) -> list[Generation]:
        """Return the generations to run, one for each prompt."""
        given = self.sampling() | {"grammar": self.grammar, "prompt": self.continued}
        return [Generation(request_id=request_id, deadline=deadline, **given)]

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        if self.stream_options is not None and self.stream_options.ask and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
        prompt = self.continued  # refuses what is wrong with it
        offer = prompt.offer if isinstance(prompt, Conversation) else None
        if self.skip_special_tokens is False and offer is not None:
            raise InvalidRequestError(
                "skip_special_tokens=false excludes tools: special tokens tell their calls from text.",
                param="skip_special_tokens",
            )
        bound = self.token_bound
        if bound is not None and (self.min_tokens or 0) > bound:
            raise InvalidRequestError(
                f"min_tokens is more than the bound of {bound} new tokens.", param="min_tokens"
            )
        if self.grammar is not None:
            self.refuse_open_ends(f"an answer that is held to {self.grammar.field}")
        if offer is not None and call_rules(offer) is not None:
            self.refuse_open_ends("a call that is held to its schema")

    def refuse_open_ends(self, answer: str) -> None:
        """Refuse options that keep `answer`, described for errors, from ending where it is complete.

        Raises:
            InvalidRequestError: the request has such an option.
        """
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} contradicts {answer}, which ends where it is complete.", param=name
                )


_ONLY_OF_BEAMS = ("best_of", "length_penalty", "early_stopping")
"""What only a beam search takes, unless it says what happens anyway."""


class AnyCompletionRequest(GenerationRequest):
    """What both completion routes take, of messages or of a text. Null means absent everywhere."""

    n: Annotated[int, Field(ge=1, le=ANSWERS_LIMIT)] | None = None
    max_tokens: TokenBound | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
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

    use_beam_search: Annotated[
        bool | None,
        Field(description="the n most likely answers that a search finds, best first, complete at its end"),
    ] = None
    best_of: Annotated[
        int | None,
        Field(ge=1, description=f"beams of a search: n, by default, to {BEAMS_LIMIT}; else as n"),
    ] = None
    length_penalty: Annotated[
        float | None,
        Field(ge=-10, le=10, description="of a search: log-probabilities over length to this power"),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        Field(description="of a search: true: it is over once it has as many answers as beams"),
    ] = None

    @classmethod
    def defaulted_in(cls, document: dict[str, Any]) -> frozenset[str]:
        """Return what takes the model's defaults: of these, a beam search takes none that is not for it."""
        names = super().defaulted_in(document)
        return names - set(Generation.not_of_beams) if document.get("use_beam_search") is True else names

    @property
    def choices(self) -> int:
        """The number of answers requested."""
        return self.n or 1

    @property
    def beam_width(self) -> int:
        """The number of beams of the search; 0: answers are sampled."""
        return (self.best_of or self.n or 1) if self.use_beam_search else 0

    def check_choices(self, limit: int, whose: str) -> None:
        """Refuse more answers, or beams, than `limit`."""
        super().check_choices(limit, whose)
        if self.beam_width > limit:
            raise InvalidRequestError(
                f"best_of is {self.beam_width}, and {whose} allows {limit}.", param="best_of"
            )

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_tokens

    @property
    def formatted(self) -> Grammar | None:
        """The grammar that `response_format` asks for."""
        return format_grammar(self.response_format)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given, and whether prompts' ranks are reported."""
        given = super().sampling() | {"prompt_ranks": self.prompt_logprobs is not None}
        of_beams: dict[str, Any] = {
            name: given.pop(name) for name in ("length_penalty", "early_stopping") if name in given
        }
        if not self.use_beam_search:
            return given
        given.pop("temperature", None)
        # One beam is the most likely token at each position, and any backend can do that.
        of_beams["beam_width"] = self.beam_width
        return given | ({"temperature": 0.0} if self.beam_width == 1 else of_beams)

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        super().check()
        self._check_beams()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs exclude stream=true.", param="prompt_logprobs")
        options = self.stream_options
        if self.stream and self.include_timings and not (options and options.include_usage):
            raise InvalidRequestError(
                "include_timings is part of the usage: a stream needs stream_options.include_usage=true.",
                param="include_timings",
            )

    def _check_beams(self) -> None:
        """Refuse what belongs to beam searches alone, or not to them."""
        answers = self.n or 1
        if not self.use_beam_search:
            for name, neutral in zip(_ONLY_OF_BEAMS, (answers, 1.0, False), strict=True):
                if getattr(self, name) not in (None, neutral):
                    raise InvalidRequestError(
                        f"{name} is only for use_beam_search=true; without it, {neutral} is the only value.",
                        param=name,
                    )
            return
        if not answers <= self.beam_width <= BEAMS_LIMIT:
            field = "n" if self.best_of is None else "best_of"
            raise InvalidRequestError(
                f"{field} is {self.beam_width}, and a beam search has n to {BEAMS_LIMIT} beams.", param=field
            )
        given = {name: value for name, value in self.sampling().items() if name != "temperature"}
        excluded = Generation.excluded_by_beams(given)
        if self.temperature not in (None, 0, 1):
            excluded = "temperature"
        elif self.grammar is not None:
            excluded = self.grammar.field
        elif self.stop:
            excluded = "stop"
        elif excluded == "prompt_logprobs" and self.prompt_logprobs is None:
            excluded = "echo"  # with log-probabilities of its own
        if excluded is not None:
            raise InvalidRequestError(
                f"{excluded} is not for use_beam_search=true, which compares the model's own probabilities"
                " of answers.",
                param=excluded,
            )
