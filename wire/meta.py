"""The `meta` document: everything in one response of a model except its text.

The responses to a generation come in this order: a refusal (an error, without `meta`), or `accepted`; then
log-probabilities or logits of the prompt; when a choice ends, its last response, with `finish_reason`. The
final response of all also has `usage`. In each heartbeat interval, before `accepted`, too, there is at least
one response, or a delta on the channel that the generation names (`wire.channel`). Only the last response of
a choice has text, and only what did not go over a channel; those with logits have these in its place. Of an
answer without a channel, others say about every second, from the first token on, how many `tokens` there are
more.
"""

from typing import Literal

import msgspec

from wire.decoding import decode_bounded

FinishReason = Literal["stop", "length"]


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The request has been validated and queued; its answer will follow."""

    request_id: str
    prompt_tokens: int
    prompt_token_ids: list[int] | None = None
    """Only if the request set `return_token_ids`."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role token opened a new segment of the answer.

    `at` is the offset in this response's text, in code points, at which the new segment begins. The role
    token itself is never text, so a typed `<|assistant|>` cannot be mistaken for one.
    """

    at: int
    role: str


class TopLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the most likely tokens at a position."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Natural-log probability of a sampled token, before temperature and truncation, floored at -9999."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top: list[TopLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Natural-log probability of a prompt's token given the tokens before it, floored at -9999.

    For the first token, `logprob` is null and `top` is empty, because there is nothing before it. `bytes` are
    what the token adds to the prompt's text.
    """

    id: int
    token: str
    bytes: list[int]
    logprob: float | None
    top: list[TopLogprob]
    rank: int | None = None
    """Only if the request set `prompt_ranks`, and not for the first token: the token's position in `top`; if
    it is not among those, the number of tokens that are at least as likely, including itself."""


class Logits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which of a prompt's logits `response` has, float32 in little-endian order instead of text.

    Row i, of `vocabulary` numbers, rates the tokens that may follow the prompt's token `first + i`.
    """

    first: int
    vocabulary: int


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Token counts of the whole request.

    The prompt counts once; `completion_tokens` counts every sampled token of every choice, including the stop
    id. `cached_tokens` is the number of the prompt's tokens that no choice had to compute.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Delivered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of a choice went over a delta channel, so that a client can tell whether it lost deltas."""

    deltas: int
    """Number of the choice's deltas in the channel's frames."""
    frame: int
    """A frame number; none of the deltas is in a later frame."""


class ProbeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine's state, and the properties of the model that it serves."""

    heartbeat_age_s: float
    """Seconds since the engine's last loop iteration or, if longer, how long a response has waited to be
    taken."""
    running: int
    waiting: int
    begun: int | None = None
    """Generations since the model was loaded; absent from an engine older than this field."""
    kv_usage: float | None = None
    """Share of the KV blocks in use, 0 to 1; absent from an engine older than this field."""
    format: str
    """The chat format of the checkpoint: `chatglm2`, `chatglm3` or `glm4`; `template`: the gateway writes its
    conversations."""
    max_context: int
    """Prompt and answer together, in tokens."""
    resumes: bool = False
    """Whether it takes `ids` of a channel and `generated` of a generation; false for a model older than
    them."""
    vocabulary: int | None = None
    """Number of ids that the model has, and so of logits for each token; absent from a model older than
    those."""


class Tokenized(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What came of a `Tokenize` or `Detokenize`."""

    ids: list[int] | None = None
    """Of the text or conversation; absent after `Detokenize`."""
    strings: list[str] | None = None
    """How each id is displayed, if requested."""


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The document of one response. One without any optional key is a heartbeat."""

    v: Literal[1] = 1
    accepted: Accepted | None = None
    index: int = 0
    """The choice that the text belongs to."""
    tokens: int = 0
    """Number of sampled tokens that this response adds (their text may still be held back)."""
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    """Those of the prompt's next tokens, some hundreds at most. All have come when the first `tokens`
    come."""
    logits: Logits | None = None
    """The response holds logits of the prompt's next tokens, some MiB at most, and no text."""
    segments: list[Segment] | None = None
    finish_reason: FinishReason | None = None
    """Set in the choice's last response."""
    stop_reason: int | str | None = None
    """The request's own stop string or stop id that ended the choice, if one did."""
    usage: Usage | None = None
    queue_s: float | None = None
    """Beside `usage`: seconds on the engine's waiting list, until the first step of whichever choice had one
    first; absent if no token was sampled."""
    delivered: Delivered | None = None
    cancelled: bool | None = None
    probe: ProbeReport | None = None
    tokenized: Tokenized | None = None


_decoder = msgspec.json.Decoder(Meta)


def decode_meta(document: bytes) -> Meta:
    """Read the `meta` tensor.

    Raises:
        msgspec.ValidationError: an unknown key or a wrong type.
        msgspec.DecodeError: not JSON, or not UTF-8.
    """
    return decode_bounded(_decoder, document)


def encode_meta(meta: Meta) -> bytes:
    """Write the `meta` tensor; keys at their default are left out."""
    return msgspec.json.encode(meta)
