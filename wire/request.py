"""The requests to a model's entry: the document in the tensor `sampling`.

Seven kinds share the tensor and are distinguished by their keys: a generation, `{"tokenize": ...}`,
`{"detokenize": [ids]}`, `{"tokenizer_files": true}`, `{"cancel": request_id}`, `{"probe": true}` and
`{"open_channel": id}`. An unknown key is an error in all of them, so that nothing is accepted and ignored: an
older model refuses a newer gateway's key by name instead of obeying half of the request.
"""

import secrets
from typing import Annotated, Literal

import msgspec

from wire.decoding import decode_bounded
from wire.grammar import Grammar, ToolName
from wire.history import Role
from wire.limits import IDS_LIMIT, INT64_MAX, TOOLS_LIMIT
from wire.sampling import Sampling, TokenId

Metadata = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\n]*\Z")]
_ID_LIMIT = 128
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=_ID_LIMIT)]
ChannelId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)]


class ChannelStream(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Where a generation's deltas go: an open channel, and the generation's numbers in its frames."""

    id: ChannelId
    stream: Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
    """The number of the first choice, chosen by the client; the other choices have the numbers after it. Open
    generations on one channel must not share numbers."""
    ids: bool = False
    """The frames also hold the ids of the generation's tokens, after which it can be resumed."""


class Generation(Sampling, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request for text.

    The prompt is either the tensors `prompt` and `history` (`role` says who speaks in `prompt`) or
    `prompt_token_ids`, never both. With `raw`, the tensor `prompt` is plain text, and `history` is empty.

    Raises:
        ValueError: the numbers of the choices on the channel exceed int64, `logits` are not all that is
            wanted, `generated` is not about all choices, or leaves none, or has no seed to go on with, or a
            beam search has a grammar or tokens to go on after (a ValidationError while decoding).
    """

    v: Literal[1] = 1
    request_id: RequestId | None = None
    role: Role = "user"
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=IDS_LIMIT)] | None = None
    raw: bool = False
    """Continue the prompt exactly as given, outside the chat format: text gets the tokenizer's prefix ids and
    nothing else; the answer has no segments and keeps its first space."""
    blank_start: bool = False
    """White space before a raw answer is none of it, as in a conversation: stop strings are matched from the
    first character behind it."""
    answer_metadata: Metadata | None = None
    """The first line of the answer, made part of the prompt: a tool's name forces a call of that tool, an
    empty line forces text. Absent: the model decides, and the line is part of its answer."""
    end_after_call_of: Annotated[list[ToolName], msgspec.Meta(max_length=TOOLS_LIMIT)] = []  # noqa: RUF012 - msgspec copies it
    """The answer ends when a new segment begins after a segment whose first line is one of these names."""
    grammar: Grammar | None = None
    """The answer as a whole conforms to this, unless it ends with the reason `length` or at one of the
    request's own stop strings or ids. In a conversation, a grammar of any kind but `tool_calls` makes the
    answer a single segment of text, whose first line is part of the prompt."""
    generated: list[Annotated[list[TokenId], msgspec.Meta(max_length=IDS_LIMIT)] | None] = []  # noqa: RUF012 - as above
    """What another server has sampled for the request before it was lost, by choice: the answer goes on after
    these tokens. Null: the choice has ended, and is left out here. Empty: the request is new."""
    logits: bool = False
    """Report the logits of every token of the prompt; there is no answer besides, so `max_tokens` is 0."""
    channel: ChannelStream | None = None
    """The answer is streamed: its deltas go to this channel. Absent: all of it comes with its end."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from receipt after which the request is given up, waiting or running."""

    def __post_init__(self) -> None:
        """Check the combinations of fields that the class's docstring excludes."""
        super().__post_init__()
        if self.channel is not None and self.channel.stream > INT64_MAX - self.n + 1:
            raise ValueError("the numbers of the choices on the channel go over int64")
        if self.logits and (
            self.max_tokens != 0
            or self.n != 1
            or self.channel is not None
            or self.prompt_logprobs is not None
            or self.echo
            or self.generated
            or self.beam_width
        ):
            raise ValueError(
                "logits come alone: with max_tokens 0, and no n, channel, prompt_logprobs or echo"
            )
        if self.beam_width and (self.grammar is not None or any(self.generated)):
            raise ValueError("a beam search has no grammar, and begins anew")
        if not self.generated:
            return
        if len(self.generated) != self.n or self.generated.count(None) == self.n:
            raise ValueError("generated needs an item for each of n choices, and one that has not ended")
        if self.seed is None:
            raise ValueError("generated needs the seed with which its tokens were sampled")


class Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Turn text into ids: the tensor `prompt` as plain text, or `prompt` and `history` as a conversation.

    The only response has `meta.tokenized`. It is answered while the engine is full.

    Raises:
        ValueError: an option of the other kind, or `answer_metadata` where no answer begins (a
            ValidationError while decoding).
    """

    tokenize: Literal["text", "conversation"]
    v: Literal[1] = 1
    prefix: bool = False
    """Text only: put the ids with which every prompt begins before it, as for a raw prompt."""
    role: Role = "user"
    """Conversation only: who speaks in `prompt`."""
    add_generation_prompt: bool = True
    """Conversation only: end where the model's answer begins."""
    answer_metadata: Metadata | None = None
    """Conversation only: the answer's first line, as in a generation; the ids end after it."""
    strings: bool = False
    """Also return how each id is displayed."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from receipt after which a request that still waits is given up."""

    def __post_init__(self) -> None:
        """Check the combinations of fields that the class's docstring excludes."""
        if self.tokenize == "text":
            if self.role != "user" or not self.add_generation_prompt or self.answer_metadata is not None:
                raise ValueError("role, add_generation_prompt and answer_metadata belong to a conversation")
        elif self.prefix:
            raise ValueError("prefix belongs to text")
        elif self.answer_metadata is not None and not self.add_generation_prompt:
            raise ValueError("answer_metadata belongs to a conversation after which the answer begins")


class Detokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Turn ids into text, which the only response has in `response`; `meta.tokenized` is there, too."""

    detokenize: Annotated[list[TokenId], msgspec.Meta(max_length=IDS_LIMIT)]
    v: Literal[1] = 1
    strings: bool = False
    """Also return how each id is displayed."""
    deadline_ms: Milliseconds | None = None
    """As for `Tokenize`."""


class TokenizerFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ask for the files of the tokenizer with which the client writes this model's conversations.

    Only for a model whose `ProbeReport.format` is `template`; all others refuse it. The responses have the
    bytes of a zip archive, in order and in parts, in place of text.
    """

    tokenizer_files: Literal[True]
    v: Literal[1] = 1


def attempt_id(request_id: str) -> str:
    """Return a `Generation.request_id` that no other attempt has, so that a cancel means this one alone.

    It is `request_id`, which clients choose and which several prompts share, and, after a space, a word that
    nobody can guess.
    """
    word = secrets.token_urlsafe(8)
    return f"{request_id[: _ID_LIMIT - len(word) - 1]} {word}"


def traced_id(attempt: str) -> str:
    """Return what stands before the space in an `attempt_id`, or all of an id without one."""
    return attempt.partition(" ")[0]


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


Request = Generation | Tokenize | Detokenize | TokenizerFiles | Cancel | Probe | OpenChannel


_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
_generation: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Generation)
_others: dict[str, msgspec.json.Decoder[Request]] = {
    "tokenize": msgspec.json.Decoder(Tokenize),
    "detokenize": msgspec.json.Decoder(Detokenize),
    "tokenizer_files": msgspec.json.Decoder(TokenizerFiles),
    "cancel": msgspec.json.Decoder(Cancel),
    "probe": msgspec.json.Decoder(Probe),
    "open_channel": msgspec.json.Decoder(OpenChannel),
}


def decode_request(document: bytes) -> Request:
    """Read the `sampling` tensor; empty bytes are a generation with all defaults.

    Raises:
        msgspec.ValidationError: an unknown key, a wrong type or a value out of range; the message has its
            path.
        msgspec.DecodeError: not JSON.
    """
    if not document:
        return Generation()
    kind = request_kind(document)
    return decode_bounded(_others[kind] if kind else _generation, document)


def request_kind(document: bytes) -> str:
    """Return the key that distinguishes a request, without reading the rest; empty for a generation.

    Raises:
        msgspec.DecodeError: not JSON.
    """
    keys = decode_bounded(_keys, document or b"{}")
    return next((name for name in _others if name in keys), "")


def encode_request(request: Request) -> bytes:
    """Write the `sampling` tensor; keys at their default are left out."""
    return msgspec.json.encode(request)
