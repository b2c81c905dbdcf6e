"""Our own stream contract (package `wire`): inputs prompt, history, sampling; outputs response, meta.

Every tensor is BYTES of shape [1, 1]. All three inputs are always sent, since Triton batches only requests
with the same set of inputs. Decoding is strict: what is not in the contract is an error, never a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
from tritonclient.grpc import service_pb2

from gateway.chatglm.conversation import to_history
from gateway.dialects.base import ModelReport
from gateway.errors import UpstreamProtocolError
from gateway.generation import (
    Accepted,
    Conversation,
    Delta,
    Event,
    Generation,
    Heartbeat,
    PlainText,
    Prompt,
    TokenIds,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from wire import meta as wire_meta
from wire import names
from wire import sampling as wire_sampling
from wire.answer import AnswerText, ContinuedText
from wire.history import Role, Turn, encode_history
from wire.strings import pack_strings, unpack_strings

_FORMATS = frozenset({"chatglm2", "chatglm3"})

_PROBE_ID = "probe"


class ChatGLMDialect:
    """See the module; stateless."""

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the inputs by which a model of this contract is known."""
        return frozenset({names.PROMPT, names.HISTORY, names.SAMPLING})

    def probe(self, model: str) -> service_pb2.ModelInferRequest:
        """Return the request that asks `model` how it is; it overtakes generations in Triton's queue."""
        sampling = wire_sampling.encode_sampling(wire_sampling.Probe(probe=True))
        return _infer_request(model, _PROBE_ID, names.URGENT_PRIORITY, (b"", b"", sampling))

    def read_probe(self, responses: Sequence[service_pb2.ModelInferResponse]) -> ModelReport:
        """Read the one response to `probe`.

        Raises:
            UpstreamProtocolError: not one response, not a probe's, or a chat format not known here.
        """
        if len(responses) != 1:
            raise _not_understood(f"{len(responses)} responses to a probe")
        probe = _read(responses[0])[1].probe
        if probe is None:
            raise _not_understood("no report in the response to a probe")
        if probe.format not in _FORMATS:
            raise _not_understood(f"the chat format {probe.format!r} is not known to this gateway")
        return ModelReport(
            heartbeat_age_s=probe.heartbeat_age_s, chat_format=probe.format, max_context=probe.max_context
        )

    def request(
        self, generation: Generation, report: ModelReport, *, remaining_s: float
    ) -> service_pb2.ModelInferRequest:
        """Return `generation` as tensors.

        Args:
            generation: its ranges were checked.
            report: of the model that gets the request; its chat format arranges the messages.
            remaining_s: seconds until the generation's deadline, above 0.

        Raises:
            InvalidRequestError: the chat format cannot express the conversation.
        """
        prompt = _prompt(generation.prompt, report.chat_format)
        sampling = wire_sampling.Generation(
            request_id=generation.request_id,
            role=prompt.role,
            prompt_token_ids=prompt.ids,
            raw=prompt.raw,
            max_tokens=generation.max_tokens,
            min_tokens=generation.min_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            min_p=generation.min_p,
            repetition_penalty=generation.repetition_penalty,
            presence_penalty=generation.presence_penalty,
            frequency_penalty=generation.frequency_penalty,
            seed=generation.seed,
            logit_bias=dict(generation.logit_bias),
            logprobs=generation.logprobs,
            stop=list(generation.stop),
            stop_token_ids=list(generation.stop_token_ids),
            ignore_eos=generation.ignore_eos,
            stream=generation.stream,
            return_token_ids=generation.return_token_ids,
            priority=generation.priority,
            deadline_ms=max(1, int(remaining_s * 1000)),
        )
        tensors = (
            prompt.text.encode(),
            encode_history(prompt.history),
            wire_sampling.encode_sampling(sampling),
        )
        return _infer_request(generation.model, generation.request_id, names.DEFAULT_PRIORITY, tensors)

    def decoder(self, generation: Generation) -> "ChatGLMAnswer":
        """Return a decoder for the answer to `generation`."""
        return ChatGLMAnswer(AnswerText() if isinstance(generation.prompt, Conversation) else ContinuedText())


@dataclass(frozen=True, slots=True, kw_only=True)
class _WirePrompt:
    """A prompt as the wire has it."""

    text: str = ""
    role: Role = "user"
    history: list[Turn] = field(default_factory=list)
    ids: list[int] | None = None
    raw: bool = False


def _prompt(prompt: Prompt, chat_format: str) -> _WirePrompt:
    match prompt:
        case Conversation(messages):
            chat = to_history(messages, chat_format)
            return _WirePrompt(text=chat.prompt, role=chat.role, history=chat.history)
        case PlainText(text):
            return _WirePrompt(text=text, raw=True)
        case TokenIds(ids):
            return _WirePrompt(ids=list(ids), raw=True)
        case _:
            assert_never(prompt)


class ChatGLMAnswer:
    """Reads one answer: `accepted`, then deltas and heartbeats, then one final with its reason and usage.

    Args:
        text: shows the answer's text.
    """

    def __init__(self, text: AnswerText | ContinuedText) -> None:
        self._text = text
        self._accepted = False
        self._finished = False

    def decode(self, response: service_pb2.ModelInferResponse) -> list[Event]:
        """Return the one event that `response` stands for.

        Raises:
            UpstreamProtocolError: it cannot be understood, or comes out of order.
        """
        text, meta = _read(response)
        if not self._accepted:
            self._accepted = True
            return [_accepted(text, meta)]
        self._check_order(meta)
        try:
            shown = self._text.push(text, meta.segments or ())
        except ValueError as error:
            raise _not_understood(str(error)) from error
        if meta.finish_reason is None:
            if not shown and not meta.tokens:
                return [Heartbeat()]
            return [
                Delta(
                    text=shown,
                    tokens=meta.tokens,
                    token_ids=_ids(meta.token_ids),
                    logprobs=_logprobs(meta.logprobs),
                )
            ]
        if meta.usage is None:
            raise _not_understood("a finish reason without usage")
        self._finished = True
        return [
            Delta(
                text=shown + self._text.finish(),
                tokens=meta.tokens,
                token_ids=_ids(meta.token_ids),
                logprobs=_logprobs(meta.logprobs),
                finish_reason=meta.finish_reason,
                usage=Usage(
                    prompt_tokens=meta.usage.prompt_tokens,
                    completion_tokens=meta.usage.completion_tokens,
                    cached_tokens=meta.usage.cached_tokens,
                ),
            )
        ]

    def end(self) -> None:
        """Check, when no response is left, that the final one was seen.

        Raises:
            UpstreamProtocolError: it was not.
        """
        if not self._finished:
            raise _not_understood("it ended without its final response")

    def _check_order(self, meta: wire_meta.Meta) -> None:
        if self._finished:
            raise _not_understood("a response after the final one")
        if meta.accepted is not None:
            raise _not_understood("accepted twice")
        if meta.index != 0:
            raise _not_understood(f"choice {meta.index} was not asked for")
        if meta.probe is not None or meta.cancelled is not None:
            raise _not_understood("the answer to another kind of request")
        if meta.usage is not None and meta.finish_reason is None:
            raise _not_understood("usage before the end")


def _accepted(text: str, meta: wire_meta.Meta) -> Accepted:
    """Read the first response, which says nothing but `accepted`."""
    if meta.accepted is None or text or meta != wire_meta.Meta(accepted=meta.accepted):
        raise _not_understood("it does not begin with accepted alone")
    return Accepted(
        prompt_tokens=meta.accepted.prompt_tokens, prompt_token_ids=_ids(meta.accepted.prompt_token_ids)
    )


def _ids(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _logprobs(logprobs: list[wire_meta.TokenLogprob] | None) -> tuple[TokenLogprob, ...] | None:
    if logprobs is None:
        return None
    return tuple(
        TokenLogprob(
            token=sampled.token,
            utf8=_utf8(sampled.bytes),
            logprob=sampled.logprob,
            top=tuple(
                TopLogprob(token=likely.token, utf8=_utf8(likely.bytes), logprob=likely.logprob)
                for likely in sampled.top
            ),
        )
        for sampled in logprobs
    )


def _utf8(values: list[int]) -> bytes:
    try:
        return bytes(values)
    except ValueError as error:
        raise _not_understood("a token's bytes are not bytes") from error


def _infer_request(
    model: str, request_id: str, priority: int, values: tuple[bytes, bytes, bytes]
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=names.stream_entry(model), id=request_id)
    request.parameters["priority"].uint64_param = priority
    for name, value in zip((names.PROMPT, names.HISTORY, names.SAMPLING), values, strict=True):
        request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(pack_strings([value]))
    return request


def _read(response: service_pb2.ModelInferResponse) -> tuple[str, wire_meta.Meta]:
    """Return the text and the document of one response."""
    tensors = {
        tensor.name: raw for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False)
    }
    try:
        (text,) = unpack_strings(tensors[names.RESPONSE])
        (document,) = unpack_strings(tensors[names.META])
        return text.decode(), wire_meta.decode_meta(document)
    except KeyError as error:
        raise _not_understood(f"no output {error}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        # ValueError: not one string, a cut tensor, not UTF-8.
        raise _not_understood(str(error)) from error


def _not_understood(what: str) -> UpstreamProtocolError:
    return UpstreamProtocolError(f"The model's answer could not be understood: {what}.")
