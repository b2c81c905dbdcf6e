"""The `sampling` document: everything in a request to a stream entry except prompt and history.

Four kinds of documents share the tensor and are distinguished by their keys: a generation, `{"cancel":
request_id}`, `{"probe": true}` and `{"open_channel": id}`. An unknown key is an error in all of them, so that
nothing is accepted and ignored: an older model refuses a newer gateway's key by name instead of obeying half
of the request.
"""

from typing import Annotated, Literal

import msgspec

from wire.decoding import decode_bounded
from wire.grammar import Grammar
from wire.history import Role
from wire.limits import (
    ANSWERS_LIMIT,
    IDS_LIMIT,
    INT64_MAX,
    LOGIT_BIAS_LIMIT,
    PRIORITY_LIMIT,
    STOP_IDS_LIMIT,
    STOP_LENGTH_LIMIT,
    STOPS_LIMIT,
    TOOLS_LIMIT,
    TOP_LOGPROBS_LIMIT,
)

WIRE_VERSION = 1

TokenId = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=STOP_LENGTH_LIMIT)]
Metadata = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\n]*\Z")]
ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
ChannelId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class ChannelStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a generation's deltas go: an open channel, and the generation's numbers in its frames."""

    id: ChannelId
    stream: Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
    """The number of the first choice, chosen by the client; the other choices have the numbers after it. Open
    generations on one channel must not share numbers."""


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request for text.

    The prompt is either the tensors `prompt` and `history` (`role` says who speaks in `prompt`) or
    `prompt_token_ids`, never both. With `raw`, the tensor `prompt` is plain text, and `history` is empty.

    Raises:
        ValueError: `prompt_ranks` without `prompt_logprobs`; `quiet` for what has more than two responses; or
            a channel for an answer that is not streamed or has `prompt_logprobs`, or whose choices' numbers
            exceed int64 (a ValidationError while decoding).
    """

    v: Literal[1] = 1
    request_id: RequestId | None = None
    role: Role = "user"
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=IDS_LIMIT)] | None = None
    raw: bool = False
    """Continue the prompt exactly as given, outside the chat format: text gets the tokenizer's prefix ids and
    nothing else; the answer has no segments and keeps its first space."""
    answer_metadata: Metadata | None = None
    """The first line of the answer, made part of the prompt: a tool's name forces a call of that tool, an
    empty line forces text. Absent: the model decides, and the line is part of its answer."""
    end_after_call_of: Annotated[list[ToolName], msgspec.Meta(max_length=TOOLS_LIMIT)] = []
    """The answer ends when a new segment begins after a segment whose first line is one of these names."""
    grammar: Grammar | None = None
    """The answer as a whole conforms to this, unless it ends with the reason `length` or at one of the
    request's own stop strings or ids. In a conversation, a grammar of any kind but `tool_calls` makes the
    answer a single segment of text, whose first line is part of the prompt."""

    n: Annotated[int, msgspec.Meta(ge=1, le=ANSWERS_LIMIT)] = 1
    """Number of choices: answers to the prompt, sampled independently. Either all of them are queued or
    none."""
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
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
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
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=INT64_MAX)] | None = None
    """Choice i has the seed `seed + i` (which wraps around in int64); absent: each choice gets a random
    one."""
    logit_bias: Annotated[dict[TokenId, Bias], msgspec.Meta(max_length=LOGIT_BIAS_LIMIT)] = {}
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    """Return the log-probabilities of each sampled token and of this many most likely tokens; absent:
    none."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    """Return, with each choice, the log-probabilities of each token of the prompt and of this many most
    likely tokens; absent: none. The whole prompt is computed for it. Not allowed with a channel: they are
    about a hundred times as large as their text, and a channel's clients buffer little."""
    prompt_ranks: bool = False
    """With `prompt_logprobs`: also return each token's rank."""

    stop: Annotated[list[StopString], msgspec.Meta(max_length=STOPS_LIMIT)] = []
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=STOP_IDS_LIMIT)] = []
    ignore_eos: bool = False
    """Continue past the model's own stop ids (`stop_token_ids` still stop)."""
    include_stop: bool = False
    """Keep what stopped the answer at the end of its text: the stop string, or the text of the stop id."""
    show_special: bool = False
    """Show the answer's special tokens in its text, by name; they then open no segments."""

    echo: bool = False
    """Each answer's text begins with the prompt's text, in its first delta. For raw prompts only."""

    stream: bool = True
    """False: there are no deltas, but the whole answer is in the final response; only `prompt_logprobs` come
    earlier."""
    quiet: bool = False
    """No heartbeats, so that only one response follows `accepted`: the answer, or a refusal. For clients on
    the model's host, which can watch the process that `accepted` names. Only for one answer that is not
    streamed, without `prompt_logprobs`."""
    channel: ChannelStream | None = None
    """Deltas go to this channel instead of the request's own stream."""
    return_token_ids: bool = False
    """Return the prompt's ids in `accepted`, and the new ids in every delta."""

    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT)] = 0
    """Order in the engine's waiting list: lower values first, equal ones in order of arrival."""
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)] | None = None
    """Milliseconds from receipt after which the request is given up, waiting or running."""

    def __post_init__(self) -> None:
        """Check the combinations of fields that the class's docstring excludes."""
        if self.prompt_ranks and self.prompt_logprobs is None:
            raise ValueError("prompt_ranks are told with prompt_logprobs, which are not asked for")
        if self.quiet and (self.stream or self.n > 1 or self.prompt_logprobs is not None):
            raise ValueError("quiet is for one answer that is not streamed, without prompt_logprobs")
        if self.channel is None:
            return
        if not self.stream:
            raise ValueError("a channel carries deltas, and an answer that is not streamed has none")
        if self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come on the request's own stream, and exclude a channel")
        if self.channel.stream > INT64_MAX - self.n + 1:
            raise ValueError("the numbers of the choices on the channel go over int64")


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """End the generation with this id. The only response's `meta.cancelled` says whether it existed."""

    cancel: RequestId
    v: Literal[1] = 1


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ask for the engine's state. Answered at once, even under full load, by one `meta.probe`."""

    probe: Literal[True]
    v: Literal[1] = 1


class OpenChannel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Open a delta channel: it stays open until the client cancels this request (see `wire.channel`)."""

    open_channel: ChannelId
    v: Literal[1] = 1


Sampling = Generation | Cancel | Probe | OpenChannel


class _Kind(msgspec.Struct):
    """Used to determine which of the four kinds a document is; strict decoding follows."""

    cancel: msgspec.Raw = msgspec.Raw()
    probe: msgspec.Raw = msgspec.Raw()
    open_channel: msgspec.Raw = msgspec.Raw()


_kind = msgspec.json.Decoder(_Kind)
_generation = msgspec.json.Decoder(Generation)
_cancel = msgspec.json.Decoder(Cancel)
_probe = msgspec.json.Decoder(Probe)
_open_channel = msgspec.json.Decoder(OpenChannel)
_encoder = msgspec.json.Encoder()


def decode_sampling(document: bytes) -> Sampling:
    """Read the `sampling` tensor; empty bytes are a generation with all defaults.

    Raises:
        msgspec.ValidationError: an unknown key, a wrong type or a value out of range; the message has its
            path.
        msgspec.DecodeError: not JSON.
    """
    if not document:
        return Generation()
    kind = decode_bounded(_kind, document)
    if kind.cancel:
        return decode_bounded(_cancel, document)
    if kind.probe:
        return decode_bounded(_probe, document)
    if kind.open_channel:
        return decode_bounded(_open_channel, document)
    return decode_bounded(_generation, document)


def encode_sampling(sampling: Sampling) -> bytes:
    """Write the `sampling` tensor; keys at their default are left out."""
    return _encoder.encode(sampling)
