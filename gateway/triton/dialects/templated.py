"""Our own contract, for an entry with a tokenizer here: where its model has no format, it is sent token ids.

The template and the tokenizer come from the folder that the setting `tokenizers` names for the entry. What
the engine enforces in answers (schemas and other grammars), it enforces here, too; calls are only read.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from gateway.chat.marked import MarkedChoice
from gateway.core.request import Conversation, Generation, PlainText
from gateway.errors import InvalidRequestError
from gateway.triton.dialects.base import (
    AnswerDecoder,
    Channels,
    Dialect,
    ModelReport,
    Probe,
    Response,
)
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.dialects.chatglm_answer import ChatGLMAnswer
from gateway.triton.dialects.foreign import is_short
from gateway.triton.dialects.logits_answer import LogitsAnswer
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt

_PROBE: Final[Probe] = CHATGLM.probe  # type: ignore[assignment]
_CHANNELS: Final[Channels] = CHATGLM.channels  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Templated:
    model: ModelText

    async def prepare(self, generation: Generation, report: ModelReport) -> Generation:
        """See `Dialect.prepare`."""
        if report.chat_format is not None or not isinstance(generation.prompt, Conversation | PlainText):
            return generation  # the engine has a format of its own, or these are ids already
        if is_short(generation.prompt):
            return self._rendered(generation)
        return await asyncio.to_thread(self._rendered, generation)

    def decoder(self, generation: Generation, report: ModelReport) -> AnswerDecoder:
        """See `Dialect.decoder`."""
        return LogitsAnswer() if generation.logits else self.channel_decoder(generation, report)

    def channel_decoder(self, generation: Generation, report: ModelReport) -> ChatGLMAnswer:
        """See `Channels.decoder`."""
        prompt = generation.prompt
        if not isinstance(prompt, RenderedPrompt) or not prompt.converses:
            return ChatGLMAnswer(generation, report)
        if generation.grammar is not None and not prompt.tools:
            return ChatGLMAnswer(generation, report)
        return ChatGLMAnswer(generation, report, lambda: MarkedChoice(self.model.reader(prompt)))

    def read_probe(self, responses: Sequence[Response]) -> ModelReport:
        """See `Probe.read`."""
        report, template = _PROBE.read(responses), self.model.template
        if report.chat_format is not None or template is None:
            return report
        return replace(report, template_reads=template.reads)

    def _rendered(self, generation: Generation) -> Generation:
        _refuse(generation)
        prompt = self.model.encoded(generation.prompt, generation.prompt_field)
        if prompt.thinking and generation.grammar is not None:
            raise InvalidRequestError(
                "The answer begins with reasoning, which no grammar allows: switch it off by"
                " chat_template_kwargs, if the model's template can.",
                param=generation.grammar.field,
            )
        special = generation.show_special or prompt.show_special
        return structs.replace(generation, prompt=prompt, show_special=special)


def templated(model: ModelText) -> Dialect:
    """Return the dialect of an entry of ours whose conversations read as `model` says."""
    made = _Templated(model)
    return replace(
        CHATGLM,
        prepare=made.prepare,
        decoder=made.decoder,
        probe=Probe(_PROBE.request, made.read_probe),
        tokens=model.exact_tokens,
        channels=replace(_CHANNELS, decoder=made.channel_decoder),
    )


def _refuse(generation: Generation) -> None:
    """Refuse what would need calls to be enforced.

    Raises:
        InvalidRequestError: a tool is strict.
    """
    offer = generation.prompt.offer if isinstance(generation.prompt, Conversation) else None
    if offer is not None and offer.choice != "none" and any(tool.strict for tool in offer.tools):
        raise InvalidRequestError(
            "The model's calls cannot be enforced: no tool is strict.", param=offer.field
        )
