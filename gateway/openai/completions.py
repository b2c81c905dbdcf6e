"""`/v1/completions`: texts, or lists of token ids, continued exactly as given.

In OpenAI's format, with token ids as in vLLM.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag

from gateway.core.events import Delta, Event, FinishReason, PromptLogprob, StopReason, TokenLogprob
from gateway.core.request import Generation, PlainText, TokenIds
from gateway.errors import InvalidRequestError
from gateway.openai.answer import (
    ChunksAnswer,
    Document,
    Gathered,
    PromptLogprobs,
    Usage,
    gather,
    prompt_logprobs_document,
    shown_token,
)
from gateway.openai.document import Items, at_most
from gateway.openai.params import AnyCompletionRequest, TokenId
from wire.limits import IDS_LIMIT, INT64_MAX
from wire.text import utf8_decoder

PROMPTS_LIMIT = 128
"""Prompts in one request; a setting limits the answers to all of them."""


def _kind_of(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        return "text" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


BY_KIND: Final = Discriminator(
    _kind_of,
    custom_error_type="prompt_type",
    custom_error_message="Input should be a string or an array",
)
"""Selects the kind of a prompt by its first item, so that errors are about the other items."""


def prompts_of(given: Any) -> tuple[PlainText | TokenIds, ...]:
    """Return what was given as one text, the ids of one, or a list of either, each of at least one item."""
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    return tuple(PlainText(each) if isinstance(each, str) else TokenIds(tuple(each)) for each in several)


Ids = Annotated[Items[TokenId], Field(min_length=1), at_most(IDS_LIMIT)]
Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Items[str], Field(max_length=PROMPTS_LIMIT), Tag("texts")]
    | Annotated[Items[Ids], Field(max_length=PROMPTS_LIMIT), Tag("lists")],
    BY_KIND,
]


class CompletionRequest(AnyCompletionRequest):
    """A text completion request. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "add_special_tokens": True,
        "max_completion_tokens": None,
        "max_output_tokens": None,
        "suffix": "",
    }
    refusals: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_completion_tokens", "max_output_tokens"), "belongs to other routes: give max_tokens"
    )
    subject: ClassVar[str] = "prompt"

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
        return prompts_of(self.prompt)

    @property
    def continued(self) -> PlainText | TokenIds:
        """The first prompt; `generations` has them all."""
        return self.prompts[0]

    @property
    def choices(self) -> int:
        """The number of answers requested, to all prompts together."""
        return len(self.prompts) * (self.n or 1)

    def check_choices(self, limit: int, whose: str) -> None:
        """Refuse more answers than `limit`."""
        prompts = len(self.prompts)
        answers = max(self.n or 1, self.beam_width)
        if prompts > 1 and prompts * answers > limit:
            each = f" with {answers} answers or beams each" if self.beam_width > 1 else ""
            each = each or (f" with {self.n} answers each" if self.n else "")
            raise InvalidRequestError(
                f"There are {prompts} prompts{each}, and {whose} allows {limit} answers in one request.",
                param="prompt",
            )
        super().check_choices(limit, whose)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given."""
        given = super().sampling()
        # Each report has as many alternatives as were requested for it, of the more that are computed.
        of_prompt = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return given | {
            "prompt_logprobs": max((each for each in of_prompt if each is not None), default=None)
        }

    def generations(self, *, request_id: str, deadline: float) -> list[Generation]:
        """Return the generations to run, one for each prompt."""
        (first,) = super().generations(request_id=request_id, deadline=deadline)
        if len(self.prompts) == 1:
            return [first]
        return [
            replace(first, prompt=prompt, prompt_field=f"prompt.{place}")
            for place, prompt in enumerate(self.prompts)
        ]

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens is 0, which leaves nothing without echo.", param="max_tokens"
            )


class CompletionLogprobs(Struct, frozen=True):
    """Those of a choice's tokens, or of a chunk's: four lists of equal length.

    With `echo` the prompt's tokens come before the answer's. The very first token has null for its
    log-probability and its alternatives.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each position, always including the actual one."""
    text_offset: list[int]
    """The offset of each token in the choice's text, in code points."""


class LogprobsWriter:
    """Writes those of one choice, at once or in parts, with the `top` most likely tokens at each position.

    With `as_ids`, tokens are named by their ids. With `special`, those that are not text are in an answer by
    name.
    """

    def __init__(self, top: int, *, as_ids: bool = False, special: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._special = special
        self._characters = 0
        """Number of characters that are complete."""
        self._decoder = utf8_decoder()

    def write(self, tokens: Sequence[TokenLogprob | PromptLogprob]) -> CompletionLogprobs:
        """Write the log-probabilities of the next tokens, those of the prompt first."""
        return CompletionLogprobs(
            [shown_token(token, as_id=self._as_ids) for token in tokens],
            [token.logprob for token in tokens],
            [self._likely(token) for token in tokens],
            [self._place(self._added(token)) for token in tokens],
        )

    def _likely(self, token: TokenLogprob | PromptLogprob) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        likely: dict[str, float] = {}
        for each in token.top[: self._top]:
            likely.setdefault(shown_token(each, as_id=self._as_ids), each.logprob)
        # Of several tokens that are shown alike, this one counts, or else the most likely one.
        likely[shown_token(token, as_id=self._as_ids)] = token.logprob
        return likely

    def _added(self, token: TokenLogprob | PromptLogprob) -> bytes:
        """Return what `token` adds to the text; of a prompt's, it is told."""
        named = self._special and isinstance(token, TokenLogprob) and token.token.strip("\ufffd")
        return token.token.encode() if named and not token.utf8 else token.utf8

    def _place(self, utf8: bytes) -> int:
        """Return the offset of the character that `utf8` begins or continues, and advance by it."""
        begun, _ = self._decoder.getstate()
        continues = b"\x80" <= utf8[:1] < b"\xc0"  # as only the bytes within a character do
        place = self._characters + (0 if continues else len(begun))
        self._characters += len(self._decoder.decode(utf8, not utf8))  # a token without text ends a character
        return place


class CompletionChoice(Struct, frozen=True):
    """A choice, or a chunk's part of one.

    The prompt's ids are in the first chunk of each, `stop_reason` stands beside the reason of the end. Its
    log-probabilities are in complete answers only.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Document, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Document, frozen=True, kw_only=True):
    """One event of a stream. `usage` is present only if requested, and null until the end."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionAnswer(ChunksAnswer):
    """The answer to a completion request, whose choices are numbered prompt by prompt.

    A stream has one chunk for each delta that shows something; the last one also has the finish reason.
    """

    kind, chunk = "cmpl", CompletionChunk

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._request = request
        as_ids = bool(request.return_tokens_as_token_ids)
        special = request.skip_special_tokens is False
        self._writers = [
            LogprobsWriter(request.logprobs or 0, as_ids=as_ids, special=special)
            for _ in range(request.choices)
        ]
        """By choice."""
        self._started: set[int] = set()

    async def complete(self, events: AsyncIterator[Event]) -> Completion:
        """Return the complete answer."""
        request = self._request
        answers, usage = await gather(events, request.choices)
        return Completion(
            **self._head,
            choices=[
                CompletionChoice(
                    answer.index,
                    answer.text,
                    self._logprobs(answer),
                    answer.finish_reason,
                    self._prompt_ids(answer.index),
                    answer.token_ids if request.return_token_ids else UNSET,
                    answer.stop_reason,
                    prompt_logprobs_document(answer.prompt_logprobs, request.prompt_logprobs),
                )
                for answer in answers
            ],
            usage=usage,
        )

    def _logprobs(self, answer: Gathered) -> CompletionLogprobs | None:
        request = self._request
        if request.logprobs is None:
            return None
        echoed = answer.prompt_logprobs if request.echo else []
        return self._writers[answer.index].write([*echoed, *answer.logprobs])

    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        logprobs = delta.prompt_logprobs + (delta.logprobs or ())
        if not (delta.text or delta.token_ids or logprobs or delta.finish_reason):
            return []
        index = delta.index
        started = index in self._started
        self._started.add(index)
        choice = CompletionChoice(
            index,
            delta.text,
            self._writers[index].write(logprobs) if logprobs or delta.logprobs is not None else None,
            delta.finish_reason,
            UNSET if started else self._prompt_ids(index),
            UNSET if delta.token_ids is None else list(delta.token_ids),
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return [self._encode([choice], usage)]
