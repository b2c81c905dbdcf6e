"""How a client wants its answer sampled and ended: the one definition of these parameters.

The gateway fills it from a request's validated body, a generation (`wire.request`) carries it, and the engine
samples by it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from wire import limits

TokenId = Annotated[int, msgspec.Meta(ge=0, le=limits.INT64_MAX)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.STOP_LENGTH_LIMIT)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.BAD_WORD_LENGTH_LIMIT)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


_LEAST_TOP_P: Final = 1e-9
"""Less than the most likely token of any vocabulary has, and more than 0 in single precision, too."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The parameters of an answer. They never affect other requests.

    Raises:
        ValueError: `prompt_ranks` without `prompt_logprobs`, a prompt of no tokens, more choices than beams,
            or what a beam search does not take (a ValidationError while decoding).
    """

    not_of_beams: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs",
    )  # fmt: skip
    """What a beam search does not take: it compares the model's own probabilities of answers."""

    n: Annotated[int, msgspec.Meta(ge=1, le=limits.ANSWERS_LIMIT)] = 1
    """Number of choices: answers to the prompt, sampled independently, or a beam search's best, best first.
    Either all of them are queued or none."""
    beam_width: Annotated[int, msgspec.Meta(ge=0, le=limits.BEAMS_LIMIT)] = 0
    """Number of beams of a search for the most likely answers, at least `n`; 0: answers are sampled. Each
    answer comes complete, at the search's end. Stop strings cut it then, and do not end a beam."""
    length_penalty: Annotated[float, msgspec.Meta(ge=-10, le=10)] = 1.0
    """Of a beam search: an answer's log-probability is divided by its number of tokens to this power."""
    early_stopping: bool | Literal["never"] = False
    """Of a beam search: whether it is over as soon as it has `beam_width` answers. False: once no beam looks
    better than the worst of these, as long as it is; `never`: nor would at its full length."""
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """New tokens of each choice; absent: the rest of the context. With 0 the answer is empty and ends with
    the reason `length`; the context must still have room for one token."""
    max_total_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Limit on prompt and answer together. With it, an answer is shortened instead of refused: the strictest
    of this, the context and `max_tokens` applies. Without it, a `max_tokens` beyond the context is
    refused."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """0 keeps only the most likely token. It becomes the least value that does, since no backend takes 0."""
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Minimum probability of a token, as a fraction of that of the most likely token."""
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    """For tokens in prompt or answer: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens in the answer, once per occurrence."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=limits.INT64_MAX)] | None = None
    """Choice i has the seed `seed + i` (`seed_of`); absent: each choice gets a random one."""
    logit_bias: Annotated[dict[TokenId, Bias], msgspec.Meta(max_length=limits.LOGIT_BIAS_LIMIT)] = {}
    allowed_token_ids: (
        Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=limits.ALLOWED_IDS_LIMIT)] | None
    ) = None
    """Only these ids are sampled; without a stop id among them, the answer ends at its limit. Absent: all."""
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=limits.BAD_WORDS_LIMIT)] = []
    """Words that the answer does not contain, neither behind a space nor within other text, in the tokens
    that the tokenizer makes of them: each one's last token is not sampled where the others precede it."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=limits.TOP_LOGPROBS_LIMIT)] | None = None
    """Return the log-probabilities of each sampled token and of this many most likely tokens; absent:
    none."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=limits.TOP_LOGPROBS_LIMIT)] | None = None
    """Return, with each choice, the log-probabilities of each token of the prompt and of this many most
    likely tokens; absent: none. The whole prompt is computed for it. They come on the request's own call."""
    prompt_ranks: bool = False
    """With `prompt_logprobs`: also return each token's rank."""

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """Keep only this many tokens of the prompt, its last ones, and count no others. -1: as many as leave room
    in the context for `max_tokens`, and for one. Absent: all, and a prompt over the context is refused."""

    stop: Annotated[list[StopString], msgspec.Meta(max_length=limits.STOPS_LIMIT)] = []
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=limits.STOP_IDS_LIMIT)] = []
    ignore_eos: bool = False
    """Continue past the model's own stop ids (`stop_token_ids` still stop)."""
    include_stop: bool = False
    """Keep what stopped the answer at the end of its text: the stop string, or the text of the stop id."""
    show_special: bool = False
    """Show the answer's special tokens in its text, by name; they then open no segments."""

    echo: bool = False
    """Each answer's text begins with the prompt's text, in its first delta. For raw prompts only."""
    return_token_ids: bool = False
    """Return the prompt's ids in `accepted`, and the new ids in every delta."""
    priority: Annotated[int, msgspec.Meta(ge=-limits.PRIORITY_LIMIT, le=limits.PRIORITY_LIMIT)] = 0
    """Order in the engine's waiting list: lower values first, equal ones in order of arrival."""

    def seed_of(self, choice: int) -> int | None:
        """Return a choice's own seed, which wraps around in int64; None: there is none."""
        return None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63

    def __post_init__(self) -> None:
        """Check the combinations of fields that the class's docstring excludes."""
        if self.top_p == 0:
            msgspec.structs.force_setattr(self, "top_p", _LEAST_TOP_P)
        if self.prompt_ranks and self.prompt_logprobs is None:
            raise ValueError("prompt_ranks belong to prompt_logprobs, which are absent")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens would leave nothing of the prompt")
        if self.beam_width:
            self._check_beams()

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise ValueError(f"{self.n} choices are more than the {self.beam_width} beams of the search")
        name = self.excluded_by_beams(msgspec.structs.asdict(self))
        if name is not None:
            raise ValueError(f"{name} is not for a beam search")

    @classmethod
    def excluded_by_beams(cls, given: Mapping[str, Any]) -> str | None:
        """Return the name of a parameter, of those `given`, that a beam search does not take; None: no."""
        neutral = Sampling()
        names = (name for name in cls.not_of_beams if name in given)
        return next((name for name in names if given[name] != getattr(neutral, name)), None)

    @property
    def sequences(self) -> int:
        """How many sequences the engine computes at a time for this."""
        return max(self.n, self.beam_width)
