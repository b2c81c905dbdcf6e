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
)
from gateway.generation import Grammar as AskedGrammar
from wire import names
from wire import sampling as wire_sampling
from wire.grammar import Grammar
from wire.history import Role, Turn, encode_history
from wire.limits import GRAMMAR_LIMIT
from wire.strings import pack_strings

_PROBE_ID = "probe"


class ChatGLMDialect:
    """See the module; stateless."""

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that identify a model of this contract."""
        return frozenset({names.PROMPT, names.HISTORY, names.SAMPLING})

    def probe(self, model: str) -> service_pb2.ModelInferRequest:
        """Return the request that probes `model`; it overtakes generations in Triton's queue."""
        sampling = wire_sampling.encode_sampling(wire_sampling.Probe(probe=True))
        return infer_request(model, _PROBE_ID, names.URGENT_PRIORITY, (b"", b"", sampling))

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
            delta_channel=probe.delta_channel,
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
        tensors = request_tensors(generation, report, remaining_s=remaining_s)
        return infer_request(generation.model, generation.request_id, names.DEFAULT_PRIORITY, tensors)

    def decoder(self, generation: Generation, report: ModelReport) -> ChatGLMAnswer:
        """Return a decoder for the answer of the model that `report` is about to `generation`."""
        return ChatGLMAnswer(generation, report)


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePrompt:
    """A prompt in the wire's form."""

    text: str = ""
    role: Role = "user"
    history: list[Turn] = field(default_factory=list)
    ids: list[int] | None = None
    raw: bool = False
    answer_metadata: str | None = None
    end_after_call_of: list[str] = field(default_factory=list)


def wire_prompt(prompt: Prompt, grammar: AskedGrammar | None, chat_format: str) -> WirePrompt:
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
            return WirePrompt(
                text=chat.prompt,
                role=chat.role,
                history=chat.history,
                answer_metadata=first_line,
                end_after_call_of=last_calls(offer) if offer else [],
            )
        case PlainText(text):
            return WirePrompt(text=text, raw=True)
        case TokenIds(ids):
            return WirePrompt(ids=list(ids), raw=True)
        case _:
            assert_never(prompt)


def _grammar(generation: Generation) -> Grammar | None:
    asked = generation.grammar
    offer = generation.prompt.offer if isinstance(generation.prompt, Conversation) else None
    rules = None if offer is None else call_rules(offer, asked)
    if offer is None or rules is None:
        return None if asked is None else Grammar(asked.kind, asked.text)
    text = msgspec.json.encode(rules).decode()
    if len(text) > GRAMMAR_LIMIT:
        raise InvalidRequestError(
            f"the schemas come to {len(text)} characters, and {GRAMMAR_LIMIT} can be enforced",
            param=offer.field,
        )
    return Grammar("tool_calls", text)


def request_tensors(
    generation: Generation,
    report: ModelReport,
    *,
    remaining_s: float,
    channel: wire_sampling.ChannelStream | None = None,
) -> tuple[bytes, bytes, bytes]:
    """Return the values of the three inputs for `generation`, whose deltas go to `channel` if given.

    Raises:
        InvalidRequestError: the chat format cannot express the conversation.
    """
    prompt = wire_prompt(generation.prompt, generation.grammar, report.chat_format)
    sampling = wire_sampling.Generation(
        request_id=generation.request_id,
        role=prompt.role,
        prompt_token_ids=prompt.ids,
        raw=prompt.raw,
        answer_metadata=prompt.answer_metadata,
        end_after_call_of=prompt.end_after_call_of,
        grammar=_grammar(generation),
        n=generation.n,
        max_tokens=generation.max_tokens,
        # With a limit on the total, `max_tokens` need not fit into the context.
        max_total_tokens=report.max_context if generation.max_tokens_yields else None,
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
        prompt_logprobs=generation.prompt_logprobs,
        prompt_ranks=generation.prompt_ranks,
        stop=list(generation.stop),
        stop_token_ids=list(generation.stop_token_ids),
        ignore_eos=generation.ignore_eos,
        include_stop=generation.include_stop,
        show_special=generation.show_special,
        echo=generation.echo,
        stream=generation.stream,
        channel=channel,
        return_token_ids=generation.return_token_ids,
        priority=generation.priority,
        deadline_ms=max(1, int(remaining_s * 1000)),
    )
    return (
        prompt.text.encode(),
        encode_history(prompt.history),
        wire_sampling.encode_sampling(sampling),
    )


def infer_request(
    model: str, request_id: str, priority: int, values: tuple[bytes, bytes, bytes]
) -> service_pb2.ModelInferRequest:
    """Return a request to the stream entry of `model` with these `values` of the three inputs."""
    request = service_pb2.ModelInferRequest(model_name=names.stream_entry(model), id=request_id)
    request.parameters["priority"].uint64_param = priority
    for name, value in zip((names.PROMPT, names.HISTORY, names.SAMPLING), values, strict=True):
        request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(pack_strings([value]))
    return request
