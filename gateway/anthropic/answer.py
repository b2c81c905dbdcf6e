"""`/v1/messages`: the answer, complete or as named events, in Anthropic's format."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, defstruct
from msgspec.structs import replace
from pydantic_core import from_json

from gateway.anthropic.errors import MessagesError, messages_error
from gateway.anthropic.request import MessagesRequest
from gateway.core.events import CallPart, Delta, Piece, Reasoning, Timings, Usage
from gateway.errors import GatewayError, UpstreamProtocolError
from gateway.openai.answer import EventsAnswer, encode, incomplete, new_id

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerText(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A block of text."""

    text: str = ""


class AnswerThinking(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """A block of reasoning. Nothing verifies it later: the signature is empty."""

    thinking: str = ""
    signature: str = ""


class AnswerToolUse(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call, with its arguments. Its result refers to `id`."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class ThinkingTokens(Struct, frozen=True):
    """How much of the output is reasoning."""

    thinking_tokens: int


class MessagesUsage(Struct, frozen=True, kw_only=True):
    """Token counts: what was found in the prefix cache is not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    """Only of models whose answers have reasoning apart."""
    timings: Timings | UnsetType = UNSET

    @classmethod
    def of(cls, counts: Usage) -> "MessagesUsage":
        """Write the token counts of a request that is complete."""
        thinking = counts.reasoning_tokens
        return cls(
            input_tokens=counts.prompt_tokens - counts.cached_tokens,
            cache_read_input_tokens=counts.cached_tokens,
            output_tokens=counts.completion_tokens,
            output_tokens_details=UNSET if thinking is None else ThinkingTokens(thinking),
            timings=counts.timings or UNSET,
        )


class MessageDocument(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The answer. At the start of a stream it has neither content nor a reason to stop."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


def _tagged(tag: str, **fields: Any) -> Any:
    """Return the type of documents with these fields whose `type` is `tag`."""
    name = "Message" + tag.title().replace("_", "")
    return defstruct(name, list(fields.items()), tag_field="type", tag=tag, frozen=True)


_TextDelta = _tagged("text_delta", text=str)
_ThinkingDelta = _tagged("thinking_delta", thinking=str)
_InputDelta = _tagged("input_json_delta", partial_json=str)
_DELTAS = {AnswerText: _TextDelta, AnswerThinking: _ThinkingDelta, AnswerToolUse: _InputDelta}
_Start = _tagged("message_start", message=MessageDocument)
_BlockStart = _tagged("content_block_start", index=int, content_block=AnswerBlock)
_BlockDelta = _tagged("content_block_delta", index=int, delta=_TextDelta | _ThinkingDelta | _InputDelta)
_BlockStop = _tagged("content_block_stop", index=int)
_End = defstruct("MessageEnd", [("stop_reason", StopReason), ("stop_sequence", str | None)], frozen=True)
_Delta = _tagged("message_delta", delta=_End, usage=MessagesUsage)
_Stop = _tagged("message_stop")
_Ping = _tagged("ping")

MessagesEvent: Any = _Start | _BlockStart | _BlockDelta | _BlockStop | _Delta | _Stop | _Ping | MessagesError
"""The data of any event; its `type` is also the name of its server-sent event."""

PING = "ping", encode(_Ping()).decode()
"""The name and the data of the event that keeps a stream open."""


class TokensCount(Struct, frozen=True):
    """How long a prompt is."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that may get more of its kind."""

    start: AnswerBlock
    pieces: list[str] = field(default_factory=list)

    def goes_on_with(self, piece: Piece) -> bool:
        if isinstance(piece, CallPart):
            return piece.name is None
        return isinstance(self.start, AnswerText if isinstance(piece, str) else AnswerThinking)

    def added(self, text: str) -> Any:
        self.pieces.append(text)
        return _DELTAS[type(self.start)](text)

    def complete(self, *, cut: bool) -> AnswerBlock:
        """Return it with its content; `cut`: it may have been broken off."""
        text = "".join(self.pieces)
        match self.start:
            case AnswerText():
                return AnswerText(text=text)
            case AnswerThinking():
                return AnswerThinking(thinking=text)
        return replace(self.start, input=_object(self.start.name, text, cut=cut))


def _block_of(piece: Piece) -> _Block:
    if isinstance(piece, str):
        return _Block(AnswerText())
    if isinstance(piece, Reasoning):
        return _Block(AnswerThinking())
    return _Block(AnswerToolUse(id=new_id("toolu"), name=piece.name or ""))


def _object(name: str, arguments: str, *, cut: bool) -> dict[str, Any]:
    """Read a call's arguments; of those that were cut, what is there.

    Raises:
        UpstreamProtocolError: the model wrote something else, which this API cannot express.
    """
    try:
        read = from_json(
            arguments or "{}", allow_inf_nan=False, allow_partial="trailing-strings" if cut else False
        )
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise UpstreamProtocolError(f"The model called {name!r} with arguments that are not a JSON object.")
    return read


class MessagesAnswer(EventsAnswer):
    """The answer to a request for a message."""

    document: MessageDocument

    def __init__(self, request: MessagesRequest, request_id: str) -> None:
        self._request_id = request_id
        self._stops = frozenset(request.sampling()["stop"])
        self.document = MessageDocument(
            id=new_id("msg"), model=request.model, usage=MessagesUsage(input_tokens=0)
        )
        self._blocks: list[_Block] = []
        self._last: Delta | None = None
        """The one with the finish reason."""

    def _begin(self) -> list[Struct]:
        usage = MessagesUsage(input_tokens=self.accepted.prompt_tokens)
        return [_Start(replace(self.document, usage=usage))]

    def _take(self, delta: Delta) -> list[Struct]:
        if delta.finish_reason is not None:
            self._last = delta
        return [*self._added(delta)]

    def _end(self) -> list[Struct]:
        message = self.document = self._complete()
        end = _End(message.stop_reason or "end_turn", message.stop_sequence)
        return [*self._stop_block(), _Delta(end, message.usage), _Stop()]

    def _fail(self, error: GatewayError) -> list[Struct]:
        return [messages_error(error, self._request_id)]

    def _added(self, delta: Delta) -> Iterator[Struct]:
        for piece in delta.pieces:
            said = piece.arguments if isinstance(piece, CallPart) else piece
            text = said.text if isinstance(said, Reasoning) else said
            if not self._blocks or not self._blocks[-1].goes_on_with(piece):
                if piece == "":
                    continue
                yield from self._stop_block()
                self._blocks.append(_block_of(piece))
                yield _BlockStart(len(self._blocks) - 1, self._blocks[-1].start)
            if text:
                yield _BlockDelta(len(self._blocks) - 1, self._blocks[-1].added(text))

    def _stop_block(self) -> Iterator[Struct]:
        if self._blocks:
            yield _BlockStop(len(self._blocks) - 1)

    def _complete(self) -> MessageDocument:
        """Return the complete message.

        Raises:
            UpstreamProtocolError: the answer has no finish reason or usage, or a call no object.
        """
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None:
            raise incomplete()
        # What ends an answer by the request's own will may do so within a call.
        cut = last.finish_reason == "length" or last.stop_reason is not None
        content = [block.complete(cut=cut and block is self._blocks[-1]) for block in self._blocks]
        stopped_by = last.stop_reason if last.stop_reason in self._stops else None
        reason: StopReason = "end_turn" if stopped_by is None else "stop_sequence"
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif last.finish_reason == "tool_calls":
            reason, stopped_by = "tool_use", None
        return replace(
            self.document,
            content=content,
            stop_reason=reason,
            stop_sequence=stopped_by,
            usage=MessagesUsage.of(last.usage),
        )
