"""The `meta` document: what one response of a stream entry says beside its text.

A generation answers in this order: a refusal (an error, no `meta`), or `accepted`; deltas and heartbeats;
the last response of each choice, with `finish_reason`, when that ends; the final one also has `usage`. Some
response comes at least every heartbeat interval.

Where the generation named a delta channel (`wire.channel`), its deltas go there, and they count as responses
for the interval.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The request was validated and queued; its answer will follow."""

    request_id: str
    prompt_tokens: int
    prompt_token_ids: list[int] | None = None
    """Only where `return_token_ids` asked for them."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role token opened a new segment of the answer.

    `at` is the offset, in code points of this response's text, where the new segment begins. The role token
    itself is never text, so a typed `<|assistant|>` cannot pass for one.
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
    """Natural-log probability of a prompt's token behind those before it, floored at -9999.

    Of the first token, which nothing is before, it is null, and there are no likely ones. `bytes` are what
    the token adds to the prompt's text.
    """

    id: int
    token: str
    bytes: list[int]
    logprob: float | None
    top: list[TopLogprob]
    rank: int | None = None
    """Where `prompt_ranks` asked for it, but of the first: its place among `top`; below them, how many tokens
    are at least as likely, itself among them."""


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Token counts of the whole request.

    The prompt counts once; `completion_tokens` counts every sampled token of every choice, the stop id too.
    `cached_tokens` are those of the prompt that no choice had to compute.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Delivered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of a choice went over a delta channel: a client with fewer deltas by that frame lost some."""

    deltas: int
    """Number of the choice's deltas in the channel's frames."""
    frame: int
    """A frame number; none of the deltas came in a later frame."""


class ProbeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine's state, and what it serves."""

    heartbeat_age_s: float
    """Seconds since the engine's last loop iteration or, if longer, that a response waits to be taken."""
    running: int
    waiting: int
    format: str
    """The chat format of the checkpoint: `chatglm2`, `chatglm3` or `glm4`."""
    max_context: int
    """Prompt and answer together, in tokens."""
    delta_channel: bool = False
    """Whether delta channels can be opened."""


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One response's document. A response with none of the optional keys is a heartbeat."""

    v: Literal[1] = 1
    accepted: Accepted | None = None
    index: int = 0
    """The choice that the text belongs to."""
    tokens: int = 0
    """Number of sampled tokens that this response covers (their text may still be held back)."""
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    """Of the prompt's next tokens, some hundreds at most; all come with the first of `tokens`, or before."""
    segments: list[Segment] | None = None
    finish_reason: FinishReason | None = None
    """Set in the choice's last response."""
    stop_reason: int | str | None = None
    """The request's own stop string or stop id that ended the choice, if one did."""
    usage: Usage | None = None
    delivered: Delivered | None = None
    cancelled: bool | None = None
    probe: ProbeReport | None = None


_decoder = msgspec.json.Decoder(Meta)
_encoder = msgspec.json.Encoder()


def decode_meta(document: bytes) -> Meta:
    """Read the `meta` tensor.

    Raises:
        msgspec.ValidationError: an unknown key or a wrong type.
        msgspec.DecodeError: not JSON.
    """
    return _decoder.decode(document)


def encode_meta(meta: Meta) -> bytes:
    """Write the `meta` tensor; keys at their default are left out."""
    return _encoder.encode(meta)
