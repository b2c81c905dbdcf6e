"""Our own contract (package `wire`): inputs prompt, history, sampling; outputs response, meta.

Every tensor is BYTES of shape [1, 1]. All three inputs are always sent, since Triton batches only requests
with the same set of inputs. Decoding is strict: what is not in the contract is an error, never a guess.

A model of the contract that has no chat format is sent token ids. The template and the tokenizer are those of
the folder that the setting `tokenizers` names for its entry; without one, those that the model sends. What
the engine enforces in answers (schemas and other grammars), it enforces here, too; calls are only read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

import msgspec
from msgspec import structs

from gateway.chat.conversation import answer_metadata, call_rules, chat_form, last_calls, to_turns
from gateway.chat.marked import MarkedChoice
from gateway.core.request import Conversation, Generation, PlainText, Prompt, TokenIds, ToolOffer, Turns
from gateway.core.request import Grammar as RequestedGrammar
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError
from gateway.triton.dialects.base import (
    AnswerDecoder,
    Channels,
    Dialect,
    ModelReport,
    Probe,
    Request,
    Response,
    Tokenizer,
    TokenizerFiles,
)
from gateway.triton.dialects.chatglm_answer import (
    ChatGLMAnswer,
    LogitsAnswer,
    not_understood,
    read,
    strings_of,
)
from gateway.triton.dialects.foreign import (
    grammar_forbids_calls,
    off_the_loop,
    reasoning_forbids,
    strict_needs_choice,
)
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt, no_template, text_of_archive
from wire import names
from wire import request as wire_request
from wire.channel import Frame, decode_frame
from wire.grammar import Grammar, Reasoning, ToolCalls
from wire.history import Role, Turn, encode_history
from wire.limits import GRAMMAR_LIMIT
from wire.meta import Meta
from wire.request import ChannelStream, attempt_id
from wire.sampling import Sampling
from wire.strings import pack_strings, unpack_strings

_PROBE_ID = "probe"
_TEMPLATE = "template"
"""The format of a model that takes text and ids only: the gateway writes its conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WirePrompt:
    """A prompt in the wire's form."""

    text: str = ""
    role: Role = "user"
    history: list[Turn] = field(default_factory=list)
    ids: list[int] | None = None
    raw: bool = False
    blank_start: bool = False
    answer_metadata: str | None = None
    end_after_call_of: list[str] = field(default_factory=list)


_NO_PROMPT = _WirePrompt()


class _Named(msgspec.Struct):
    """What of a generation names it in a cancel."""

    request_id: str


_named = msgspec.json.Decoder(_Named)


def _infer_request(
    model: str, request_id: str, request: wire_request.Request, prompt: _WirePrompt = _NO_PROMPT
) -> Request:
    """Return `request` to the entry of `model` as tensors."""
    message = Request(model_name=model, id=request_id)
    for name, value in (
        (names.PROMPT, prompt.text.encode()),
        (names.HISTORY, encode_history(prompt.history) if prompt.history else b""),
        (names.SAMPLING, wire_request.encode_request(request)),
    ):
        message.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        message.raw_input_contents.append(pack_strings([value]))
    return message


def _read_one(responses: Sequence[Response], what: str) -> tuple[str, Meta]:
    if len(responses) != 1:
        raise not_understood(f"{len(responses)} responses to a {what}")
    return read(responses[0])


def _probe(model: str) -> Request:
    return _infer_request(model, _PROBE_ID, wire_request.Probe(probe=True))


def _read_probe(responses: Sequence[Response]) -> ModelReport:
    probe = _read_one(responses, "probe")[1].probe
    if probe is None:
        raise not_understood("no report in the response to a probe")
    if probe.format != _TEMPLATE:
        chat_form(probe.format)  # one that is not known here is an error
    return ModelReport(
        heartbeat_age_s=probe.heartbeat_age_s,
        open=probe.running + probe.waiting,
        waiting=probe.waiting,
        begun=probe.begun,
        kv_usage=probe.kv_usage,
        chat_format=None if probe.format == _TEMPLATE else probe.format,
        max_context=probe.max_context,
        resumes=probe.resumes,
        vocabulary=probe.vocabulary,
    )


def _open_channel(model: str, channel_id: str) -> Request:
    return _infer_request(model, channel_id, wire_request.OpenChannel(channel_id))


def _read_frame(response: Response) -> Frame:
    try:
        (document,) = strings_of(response, names.META)
        return decode_frame(document)
    except (ValueError, msgspec.MsgspecError) as error:
        raise not_understood(str(error)) from error


def _ask_for_files(model: str) -> Request:
    return _infer_request(model, "tokenizer-files", wire_request.TokenizerFiles(tokenizer_files=True))


def _read_files(responses: Sequence[Response]) -> Dialect:
    parts = [part for response in responses for part in strings_of(response, names.RESPONSE)]
    return templated(text_of_archive(b"".join(parts)))


def _request(
    generation: Generation, report: ModelReport, remaining_s: float, channel: ChannelStream | None = None
) -> Request:
    """Return `generation` as tensors; without `channel`, all text comes with the end of its choice."""
    prompt = _wire_prompt(generation.prompt, generation.grammar, report)
    sampling = {name: getattr(generation, name) for name in Sampling.__struct_fields__}
    request = wire_request.Generation(
        **sampling | {"max_total_tokens": _max_total_tokens(generation, report)},
        request_id=attempt_id(generation.request_id),
        role=prompt.role,
        prompt_token_ids=prompt.ids,
        raw=prompt.raw,
        blank_start=prompt.blank_start and bool(generation.stop),  # nothing else depends on it
        answer_metadata=prompt.answer_metadata,
        end_after_call_of=prompt.end_after_call_of,
        grammar=_grammar(generation),
        logits=generation.logits,
        generated=[None if ids is None else list(ids) for ids in generation.generated],
        channel=channel,
        deadline_ms=_milliseconds(remaining_s),
    )
    return _infer_request(generation.model, generation.request_id, request, prompt)


def _cancel(sent: Request) -> Request:
    (document,) = unpack_strings(sent.raw_input_contents[-1])
    name = _named.decode(document).request_id
    return _infer_request(sent.model_name, sent.id, wire_request.Cancel(name))


def _tokenize(tokenization: Tokenization, report: ModelReport, remaining_s: float) -> Request:
    prompt = _wire_prompt(tokenization.prompt, tokenization.grammar, report)
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


def _read_tokens(tokenization: Tokenization, responses: Sequence[Response]) -> Tokens:
    text, meta = _read_one(responses, "tokenization")
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


def _wire_prompt(prompt: Prompt, grammar: RequestedGrammar | None, report: ModelReport) -> _WirePrompt:
    """Return `prompt`, whose answer's text has `grammar`, in the wire's form.

    Raises:
        InvalidRequestError: the model's chat format cannot express the conversation.
    """
    match prompt:
        case RenderedPrompt(ids=ids, converses=converses):
            return _WirePrompt(ids=list(ids), raw=True, blank_start=converses and prompt.grammar is None)
        case Conversation() if report.chat_format is None:
            raise no_template()
        case Conversation(messages, offer):
            form = chat_form(report.chat_format)
            *earlier, newest = to_turns(messages, form, offer)
            first_line = None if offer is None else answer_metadata(offer)
            if offer is None and grammar is not None and form.tools is not None:
                first_line = ""  # The answer is text, not a call.
            return _WirePrompt(
                text=newest.content,
                role=newest.role,
                history=earlier,
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
    grammar, prompt = generation.grammar, generation.prompt
    if isinstance(prompt, RenderedPrompt):
        return prompt.grammar
    offer = prompt.offer if isinstance(prompt, Conversation) else None
    rules = None if offer is None else call_rules(offer, grammar)
    if offer is None or rules is None:
        return None if grammar is None else Grammar(grammar.kind, grammar.text)
    return _grammar_of_calls(rules, offer)


def _grammar_of_calls(rules: ToolCalls, offer: ToolOffer, reasoning: Reasoning | None = None) -> Grammar:
    text = msgspec.json.encode(rules).decode()
    if len(text) > GRAMMAR_LIMIT:
        raise InvalidRequestError(
            f"the schemas come to {len(text)} characters, and {GRAMMAR_LIMIT} can be enforced",
            param=offer.field,
        )
    return Grammar("tool_calls", text, reasoning)


def _max_total_tokens(generation: Generation, report: ModelReport) -> int | None:
    """Return the limit on prompt and answer; with one, `max_tokens` need not fit into the context."""
    limits = [generation.max_total_tokens]
    if generation.max_tokens_yields:
        limits.append(report.max_context)
    return min((limit for limit in limits if limit is not None), default=None)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


CHATGLM = Dialect(
    name="chatglm",
    inputs=frozenset({names.PROMPT, names.HISTORY, names.SAMPLING}),
    request=_request,
    decoder=lambda generation, report: (
        LogitsAnswer() if generation.logits else ChatGLMAnswer(generation, report)
    ),
    cancel=_cancel,
    probe=Probe(_probe, _read_probe),
    tokenizer=Tokenizer(_tokenize, _read_tokens),
    tokenizer_files=TokenizerFiles(_ask_for_files, _read_files),
    channels=Channels(_open_channel, _read_frame, _request, ChatGLMAnswer),
)
"""The contract, with all of its optional parts."""


def templated(model: ModelText) -> Dialect:
    """Return the dialect of an entry of ours whose conversations read as `model` says."""

    async def prepare(generation: Generation, report: ModelReport) -> Generation:
        if report.chat_format is not None or not isinstance(generation.prompt, Conversation | PlainText):
            return generation  # the engine has a format of its own, or these are ids already
        return await off_the_loop(partial(_rendered, model), generation)

    def answer(generation: Generation, report: ModelReport) -> ChatGLMAnswer:
        prompt = generation.prompt
        if isinstance(prompt, RenderedPrompt) and _is_marked(prompt, generation):
            count = model.required_vocabulary().count if prompt.thinks else None
            return ChatGLMAnswer(generation, report, lambda: MarkedChoice(model.reader(prompt)), count)
        return ChatGLMAnswer(generation, report)

    def decoder(generation: Generation, report: ModelReport) -> AnswerDecoder:
        return LogitsAnswer() if generation.logits else answer(generation, report)

    def read_probe(responses: Sequence[Response]) -> ModelReport:
        report = _read_probe(responses)
        if report.chat_format is not None or model.template is None:
            return report
        return replace(report, template_reads=model.template.reads)

    return replace(
        CHATGLM,
        prepare=prepare,
        decoder=decoder,
        probe=Probe(_probe, read_probe),
        tokens=partial(model.tokens, exact=True),
        tokenizer_files=None,
        channels=Channels(_open_channel, _read_frame, _request, answer),
    )


def _is_marked(prompt: RenderedPrompt, generation: Generation) -> bool:
    """Whether there may be more than text in an answer; of a grammar's text, nothing is left out."""
    return prompt.converses and (bool(prompt.tools) or prompt.thinks or generation.grammar is None)


def _rendered(model: ModelText, generation: Generation) -> Generation:
    prompt = model.encoded(generation.prompt, generation.prompt_field)
    prompt = replace(
        prompt,
        listed=prompt.listed and model.call_marks is None,
        grammar=_templated_grammar(model, generation, prompt),
    )
    special = generation.show_special or prompt.show_special
    return structs.replace(generation, prompt=prompt, show_special=special)


def _templated_grammar(model: ModelText, generation: Generation, prompt: RenderedPrompt) -> Grammar | None:
    """Return the grammar of an answer whose prompt a template wrote; None: it is free.

    Raises:
        InvalidRequestError: the answer may also be, or begins with, what no grammar can tell from it.
    """
    grammar, offer, reasoning = generation.grammar, prompt.offer, model.reasoning_before(prompt)
    rules = None if offer is None else call_rules(offer, grammar)
    if rules is None and grammar is None:
        return None
    if prompt.thinking and reasoning is None:
        raise reasoning_forbids(grammar, offer)
    if offer is None or rules is None:
        return None if grammar is None else Grammar(grammar.kind, grammar.text, reasoning)
    if rules.required:
        return _grammar_of_calls(structs.replace(rules, marks=model.call_marks), offer, reasoning)
    held = model.held(rules)
    if held is None or (held.opening is not None and reasoning is not None):
        raise strict_needs_choice(offer) if grammar is None else grammar_forbids_calls(grammar)
    return _grammar_of_calls(held, offer, reasoning)
