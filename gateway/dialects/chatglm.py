"""Our own contract (package `wire`): inputs prompt, history, sampling; outputs response, meta.

Every tensor is BYTES of shape [1, 1]. All three inputs are always sent, since Triton batches only requests
with the same set of inputs. Decoding is strict: what is not in the contract is an error, never a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
from tritonclient.grpc import service_pb2

from gateway.chatglm.conversation import to_history
from gateway.chatglm.formats import chat_form
from gateway.chatglm.tool_offer import answer_metadata, call_rules, last_calls
from gateway.dialects.base import ModelReport
from gateway.dialects.chatglm_answer import ChatGLMAnswer, not_understood, read
from gateway.errors import InvalidRequestError
from gateway.generation import (
    Conversation,
    Generation,
    PlainText,
    Prompt,
    TokenIds,
    Turns,
)
from gateway.generation import Grammar as RequestedGrammar
from gateway.tokenization import Tokenization, Tokens
from wire import names
from wire import request as wire_request
from wire.channel import Frame, decode_frame
from wire.grammar import Grammar
from wire.history import Role, Turn, encode_history
from wire.limits import GRAMMAR_LIMIT
from wire.request import ChannelStream
from wire.sampling import Sampling
from wire.strings import pack_strings, unpack_strings

_PROBE_ID = "probe"


class ChatGLMDialect:
    """The contract and all of its optional parts; stateless."""

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that identify a model of this contract."""
        return frozenset({names.PROMPT, names.HISTORY, names.SAMPLING})

    @property
    def channels(self) -> "ChatGLMDialect":
        """Delta channels: all streamed answers come over one."""
        return self

    @property
    def tokenizer(self) -> "ChatGLMDialect":
        """The model's tokenizer."""
        return self

    def probe(self, model: str) -> service_pb2.ModelInferRequest:
        """Return the request that probes `model`."""
        return _infer_request(model, _PROBE_ID, wire_request.Probe(probe=True))

    def read_probe(self, responses: Sequence[service_pb2.ModelInferResponse]) -> ModelReport:
        """Read the one response to `probe`.

        Raises:
            UpstreamProtocolError: not one response, not a probe's, or a chat format not known here.
        """
        if len(responses) != 1:
            raise not_understood(f"{len(responses)} responses to a probe")
        probe = read(responses[0])[1].probe
        if probe is None:
            raise not_understood("no report in the response to a probe")
        chat_form(probe.format)
        return ModelReport(
            heartbeat_age_s=probe.heartbeat_age_s,
            chat_format=probe.format,
            max_context=probe.max_context,
        )

    def request(
        self,
        generation: Generation,
        report: ModelReport,
        *,
        remaining_s: float,
        channel: ChannelStream | None = None,
    ) -> service_pb2.ModelInferRequest:
        """Return `generation` as tensors.

        Args:
            generation: its ranges were checked.
            report: of the model that gets the request; its chat format arranges the messages.
            remaining_s: seconds until the generation's deadline, above 0.
            channel: where the deltas go; None: all text comes with the end of its choice.

        Raises:
            InvalidRequestError: the chat format cannot express the conversation.
        """
        prompt = _wire_prompt(generation.prompt, generation.grammar, report.chat_format)
        sampling = {name: getattr(generation, name) for name in Sampling.__struct_fields__}
        request = wire_request.Generation(
            **sampling | {"max_total_tokens": _max_total_tokens(generation, report)},
            request_id=generation.request_id,
            role=prompt.role,
            prompt_token_ids=prompt.ids,
            raw=prompt.raw,
            answer_metadata=prompt.answer_metadata,
            end_after_call_of=prompt.end_after_call_of,
            grammar=_grammar(generation),
            channel=channel,
            deadline_ms=_milliseconds(remaining_s),
        )
        return _infer_request(generation.model, generation.request_id, request, prompt)

    def decoder(self, generation: Generation, report: ModelReport) -> ChatGLMAnswer:
        """Return a decoder for the answer of the model that `report` is about to `generation`."""
        return ChatGLMAnswer(generation, report)

    def open_channel(self, model: str, channel_id: str) -> service_pb2.ModelInferRequest:
        """Return the request that opens a channel to `model`."""
        return _infer_request(model, channel_id, wire_request.OpenChannel(channel_id))

    def read_frame(self, response: service_pb2.ModelInferResponse) -> Frame:
        """Read a channel's response.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False):
            if tensor.name == names.META:
                try:
                    (document,) = unpack_strings(raw)
                    return decode_frame(document)
                except (ValueError, msgspec.MsgspecError) as error:
                    raise not_understood(str(error)) from error
        raise not_understood("a frame without its document")

    def tokenize(
        self, tokenization: Tokenization, report: ModelReport, *, remaining_s: float
    ) -> service_pb2.ModelInferRequest:
        """Return `tokenization` as tensors for the model that `report` is about.

        Raises:
            InvalidRequestError: the chat format cannot express the conversation.
        """
        prompt = _wire_prompt(tokenization.prompt, tokenization.grammar, report.chat_format)
        strings, deadline_ms = tokenization.strings, _milliseconds(remaining_s)
        request: wire_request.Request
        if prompt.ids is not None:
            request = wire_request.Detokenize(detokenize=prompt.ids, strings=strings, deadline_ms=deadline_ms)
            prompt = _NO_PROMPT
        elif prompt.raw:
            request = wire_request.Tokenize(
                tokenize="text", prefix=tokenization.prefix, strings=strings, deadline_ms=deadline_ms
            )
        else:
            request = wire_request.Tokenize(
                tokenize="conversation",
                role=prompt.role,
                add_generation_prompt=tokenization.answer_next,
                answer_metadata=prompt.answer_metadata if tokenization.answer_next else None,
                strings=strings,
                deadline_ms=deadline_ms,
            )
        return _infer_request(tokenization.model, tokenization.request_id, request, prompt)

    def read_tokens(
        self, tokenization: Tokenization, responses: Sequence[service_pb2.ModelInferResponse]
    ) -> Tokens:
        """Read the one response to the request for `tokenization`.

        Raises:
            UpstreamProtocolError: not one response, or not a tokenization's.
        """
        if len(responses) != 1:
            raise not_understood(f"{len(responses)} responses to a tokenization")
        text, meta = read(responses[0])
        tokenized = meta.tokenized
        if tokenized is None:
            raise not_understood("no ids in the response to a tokenization")
        if tokenization.strings != (tokenized.strings is not None):
            raise not_understood("strings belong to tokenizations that request them")
        if isinstance(tokenization.prompt, TokenIds):
            return Tokens(text=text, strings=tokenized.strings)
        if tokenized.ids is None:
            raise not_understood("no ids in the response to a tokenization")
        if tokenized.strings is not None and len(tokenized.strings) != len(tokenized.ids):
            raise not_understood("not one string for each id")
        return Tokens(ids=tokenized.ids, strings=tokenized.strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WirePrompt:
    """A prompt in the wire's form."""

    text: str = ""
    role: Role = "user"
    history: list[Turn] = field(default_factory=list)
    ids: list[int] | None = None
    raw: bool = False
    answer_metadata: str | None = None
    end_after_call_of: list[str] = field(default_factory=list)


_NO_PROMPT = _WirePrompt()


def _wire_prompt(prompt: Prompt, grammar: RequestedGrammar | None, chat_format: str) -> _WirePrompt:
    """Return `prompt` in the wire's form, for a model of `chat_format`.

    Args:
        prompt: to be answered or continued.
        grammar: of the answer's text.
        chat_format: as the model reports it.

    Raises:
        InvalidRequestError: the chat format cannot express the conversation.
    """
    match prompt:
        case Conversation(messages, offer):
            form = chat_form(chat_format)
            chat = to_history(messages, form, offer)
            first_line = None if offer is None else answer_metadata(offer)
            if offer is None and grammar is not None and form.tools is not None:
                first_line = ""  # The answer is text, not a call.
            return _WirePrompt(
                text=chat.prompt,
                role=chat.role,
                history=chat.history,
                answer_metadata=first_line,
                end_after_call_of=last_calls(offer) if offer else [],
            )
        case Turns(history, text, role):
            return _WirePrompt(text=text, role=role, history=list(history))
        case PlainText(text):
            return _WirePrompt(text=text, raw=True)
        case TokenIds(ids):
            return _WirePrompt(ids=list(ids), raw=True)
        case _:
            assert_never(prompt)


def _grammar(generation: Generation) -> Grammar | None:
    grammar = generation.grammar
    offer = generation.prompt.offer if isinstance(generation.prompt, Conversation) else None
    rules = None if offer is None else call_rules(offer, grammar)
    if offer is None or rules is None:
        return None if grammar is None else Grammar(grammar.kind, grammar.text)
    text = msgspec.json.encode(rules).decode()
    if len(text) > GRAMMAR_LIMIT:
        raise InvalidRequestError(
            f"the schemas come to {len(text)} characters, and {GRAMMAR_LIMIT} can be enforced",
            param=offer.field,
        )
    return Grammar("tool_calls", text)


def _max_total_tokens(generation: Generation, report: ModelReport) -> int | None:
    """Return the limit on prompt and answer; with one, `max_tokens` need not fit into the context."""
    limit = generation.max_total_tokens
    if not generation.max_tokens_yields:
        return limit
    return report.max_context if limit is None else min(limit, report.max_context)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _infer_request(
    model: str, request_id: str, request: wire_request.Request, prompt: _WirePrompt = _NO_PROMPT
) -> service_pb2.ModelInferRequest:
    """Return `request` to the entry of `model` as tensors."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in (
        (names.PROMPT, prompt.text.encode()),
        (names.HISTORY, encode_history(prompt.history) if prompt.history else b""),
        (names.SAMPLING, wire_request.encode_request(request)),
    ):
        message.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        message.raw_input_contents.append(pack_strings([value]))
    return message
