"""What dialects of other people's backends share: how a contract makes a dialect, and what it refuses.

Such a backend has no heartbeats, no probe and no delta channels, and reports less than ours. What it cannot
do is a 400 that names the parameter.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, cast

from msgspec.structs import replace

from gateway.chat.call_list import list_schema
from gateway.chat.conversation import call_rules
from gateway.chat.structural_tags import UnenforceableError, behind_reasoning, structural_tag
from gateway.core.request import (
    Conversation,
    Generation,
    Grammar,
    PlainText,
    Prompt,
    TokenIds,
    ToolOffer,
    images_in,
)
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError
from gateway.triton.dialects.base import AnswerDecoder, Dialect, Embedder, ModelReport, Request
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import DEFAULTS
from wire.grammar import ToolCalls

_COUNTS_PROMPT: Final = "return_num_input_tokens"
"""The input by which backends report the number of a prompt's tokens."""
_COUNTS_ANSWER: Final = "return_num_output_tokens"
"""The input by which they report that of an answer's."""
_SHORT_TEXT: Final = 2048
_SHORT_MESSAGES: Final = 16

_MADE_HERE: Final = frozenset({"n", "echo"})
"""Parameters that no backend has to know."""
_PUBLIC: Final = {
    "beam_width": "use_beam_search",
    "include_stop": "include_stop_str_in_output",
    "show_special": "skip_special_tokens",
    "prompt_ranks": "prompt_logprobs",
}
"""Names in requests of parameters that are called otherwise within."""


def as_text(generation: Generation, inputs: Collection[str], model: ModelText) -> RenderedPrompt:
    """Return a prompt as text, counted where the backend does not.

    Raises:
        InvalidRequestError: the model takes no such prompt.
    """
    count = _COUNTS_PROMPT not in inputs
    return model.render(generation.prompt, generation.prompt_field, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One backend's tensors, for any model of it."""

    inputs: frozenset[str]
    """The names of the inputs that a model must have."""
    supported: Collection[str]
    """The fields of `Sampling` that it honours."""
    write: Callable[[Generation, RenderedPrompt, Collection[str], ModelText], Request]
    """Returns a generation, with what `prompt` made of its prompt, as those inputs that the model has.

    Raises InvalidRequestError: the model cannot express it.
    """
    answer: Callable[[Generation, RenderedPrompt, Collection[str], ModelText], AnswerDecoder]
    """Returns a decoder for the answer; given the same."""
    prompt: Callable[[Generation, Collection[str], ModelText], RenderedPrompt] = as_text
    """Returns a prompt as the model takes it. Raises InvalidRequestError: it takes no such prompt."""
    embedder: Callable[[Collection[str]], Embedder | None] | None = None
    """Returns what embeds with a model that has these inputs; None: nothing does."""
    ids: bool = False
    """It takes token ids only."""
    images: str | None = None
    """The input that takes a prompt's images; None: there is none."""
    adapters: bool = False
    """It applies LoRA adapters by their names."""
    tags: bool = False
    """It knows xgrammar's structural tags: it holds calls to schemas wherever they come in an answer."""
    streams: bool | None = True
    """As in `Dialect`."""

    def needs_tokenizer(self, inputs: Collection[str]) -> bool:
        """Whether a model with these inputs needs a tokenizer here: to count, or to be asked at all."""
        return self.ids or _COUNTS_ANSWER not in inputs

    def dialect(self, inputs: frozenset[str], model: ModelText) -> Dialect:
        """Return the dialect of a model with these inputs, whose conversations read as `model` says."""
        if "show_special" not in self.supported:
            model = model.without_special()

        def rendered(generation: Generation) -> Generation:
            prompt = self.prompt(generation, inputs, model)
            return _constrained(generation, prompt, model if self.tags else None)

        async def prepare(generation: Generation, _report: ModelReport) -> Generation:
            refuse_others(generation, self.supported)
            if self.images not in inputs:
                refuse_images(generation.prompt, "The model takes no images.")
            return await off_the_loop(rendered, generation)

        def request(generation: Generation, _report: ModelReport, _remaining_s: float) -> Request:
            return self.write(generation, _prompt_of(generation), inputs, model)

        def tokens(tokenization: Tokenization) -> Tokens:
            refuse_images(tokenization.prompt, "What tokens become of an image, the model alone knows.")
            return model.tokens(tokenization, exact=self.ids)

        def decoder(generation: Generation, _report: ModelReport) -> AnswerDecoder:
            return self.answer(generation, _prompt_of(generation), inputs, model)

        return Dialect(
            inputs=self.inputs,
            prepare=prepare,
            request=request,
            decoder=decoder,
            tokens=tokens,
            embedder=None if self.embedder is None else self.embedder(inputs),
            adapters=self.adapters,
            choices=False,
            counts_at_end=model.thinks or _COUNTS_ANSWER not in inputs,
            heartbeats=False,
            streams=self.streams,
            report=ModelReport(template_reads=model.template.reads if model.template else frozenset()),
        )


def _prompt_of(generation: Generation) -> RenderedPrompt:
    return cast("RenderedPrompt", generation.prompt)


async def off_the_loop(render: Callable[[Generation], Generation], generation: Generation) -> Generation:
    """Return what `render` makes of a generation: on a thread, unless that would take longer than it does."""
    if _is_short(generation.prompt):
        return render(generation)
    return await asyncio.to_thread(render, generation)


def _is_short(prompt: Prompt) -> bool:
    if isinstance(prompt, Conversation):
        messages = prompt.messages
        return (
            prompt.offer is None
            and len(messages) <= _SHORT_MESSAGES
            and sum(len(message.content) for message in messages) <= _SHORT_TEXT
            and not any(message.calls or message.reasoning for message in messages)
        )
    return isinstance(prompt, TokenIds) or (isinstance(prompt, PlainText) and len(prompt.text) <= _SHORT_TEXT)


def refuse_images(prompt: Prompt, reason: str) -> None:
    """Refuse a prompt with images.

    Raises:
        InvalidRequestError: for `reason`; it names the first of them.
    """
    for image in images_in(prompt):
        raise InvalidRequestError(reason, param=image.field)


def refuse_others(generation: Generation, supported: Collection[str]) -> None:
    """Refuse parameters that are not passed on to a backend, unless they change nothing.

    Raises:
        InvalidRequestError: it names the parameter.
    """
    for name, default in DEFAULTS.items():
        if name not in _MADE_HERE and name not in supported and getattr(generation, name) != default:
            public = _PUBLIC.get(name, name)
            raise InvalidRequestError(f"{public!r} cannot be used with this model.", param=public)
    if generation.max_tokens == 0:
        raise InvalidRequestError("The model's backend generates at least one token.", param="max_tokens")


def _constrained(generation: Generation, prompt: RenderedPrompt, model: ModelText | None) -> Generation:
    """Return a generation for `prompt`, with what its answer is held to.

    `model` says how calls and reasoning are written; None: the backend knows no structural tags.

    Raises:
        InvalidRequestError: the answer may also be, or begins with, what a grammar of all of it would forbid.
    """
    grammar, offer = generation.grammar, prompt.offer
    rules = None if offer is None else call_rules(offer, grammar)
    if offer is not None and rules is not None:
        if rules.required:
            text = json.dumps(list_schema(rules), ensure_ascii=False)
            grammar = Grammar(kind="json_schema", text=text, field=offer.choice_field)
        elif grammar is not None:
            raise grammar_forbids_calls(grammar)
        else:
            prompt = dataclasses.replace(prompt, tagged=_tag(rules, offer, model, prompt))
    if grammar is not None and prompt.thinking:
        reasoning = None if model is None else model.reasoning(prompt)
        tag = None if reasoning is None else behind_reasoning(grammar.kind, grammar.text, reasoning)
        if tag is None:
            raise reasoning_forbids(grammar, offer)
        prompt = dataclasses.replace(prompt, tagged=tag)
    return replace(
        generation,
        prompt=prompt,
        grammar=grammar,
        show_special=generation.show_special or prompt.show_special,
    )


def _tag(
    calls: ToolCalls, offer: ToolOffer, model: ModelText | None, prompt: RenderedPrompt
) -> dict[str, Any]:
    form = None if model is None else model.call_form
    if model is None or form is None:
        raise strict_needs_choice(offer)
    # A string without quotes could begin as reasoning, and end that.
    reasoning = model.reasoning(prompt, again=form.pair is not None)
    try:
        return structural_tag(calls, form, reasoning)
    except UnenforceableError as error:
        place = next(tool.place for tool in offer.tools if tool.name == error.tool)
        message = f"{error}: leave it out, or 'strict'."
        raise InvalidRequestError(message, param=offer.schema_field.format(place)) from error


def strict_needs_choice(offer: ToolOffer) -> InvalidRequestError:
    """Return the error for strict tools that the model may call or not, and writes in a way of its own."""
    return InvalidRequestError(
        "Of this model, a call is enforced where it must come: choose a tool, or 'required', by"
        " tool_choice, or leave out 'strict'.",
        param=offer.field,
    )


def reasoning_forbids(grammar: Grammar | None, offer: ToolOffer | None) -> InvalidRequestError:
    """Return the error for a grammar, or for calls that must come, behind reasoning that was begun."""
    field = grammar.field if grammar is not None else offer.choice_field if offer is not None else None
    return InvalidRequestError(
        "The answer begins with reasoning, which no grammar allows: switch it off by"
        " chat_template_kwargs, if the model's template can.",
        param=field,
    )


def grammar_forbids_calls(grammar: Grammar) -> InvalidRequestError:
    """Return the error for a grammar of all of an answer beside tools that may be called."""
    return InvalidRequestError(
        "With this model, a grammar or schema of the answer would forbid calling a tool:"
        ' leave out one of them, or set tool_choice to "none".',
        param=grammar.field,
    )
