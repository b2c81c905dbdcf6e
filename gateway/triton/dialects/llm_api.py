"""TensorRT-LLM's LLM-API model: text in, text out, one input for each parameter.

Source of the contract: https://github.com/NVIDIA/TensorRT-LLM, `triton_backend/all_models/llmapi`. It counts
no tokens and knows no log-probabilities and no grammars. Its text has been cumulative in some releases and
not in others. A model that is not decoupled takes no requests for streams: it is asked for all at once.
"""

from collections.abc import Collection
from typing import Final

from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.errors import InvalidRequestError
from gateway.triton.dialects.base import Request, Response
from gateway.triton.dialects.foreign import Contract
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import Tensors, outputs
from gateway.triton.dialects.text_answer import DEFAULT_MAX_TOKENS, Growth, News, TextAnswer, TextDecoder

_NUMBERS: Final = {
    "temperature": "FP32",
    "top_p": "FP32",
    "top_k": "INT32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "min_tokens": "INT32",
    "seed": "UINT64",
}
"""Datatypes of the parameters that are numbers, by their names here and after `sampling_param_`."""
_UNENDED: Final = "None"
"""What it sends as finish reason until there is one."""
_SUPPORTED: Final = (*_NUMBERS, "max_tokens", "stop", "priority")


def _write(
    generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], _model: ModelText
) -> Request:
    if generation.grammar is not None:
        raise InvalidRequestError("The model's backend has no grammars.", param=generation.grammar.field)
    message = Request(model_name=generation.model, id=generation.request_id)
    tensors = Tensors(message, inputs)
    tensors.text("text_input", prompt.text)
    tensors.numbers("streaming", "BOOL", generation.stream)
    tensors.numbers("return_finish_reason", "BOOL", True)  # noqa: FBT003 - a tensor's value
    limit = generation.max_tokens if generation.max_tokens is not None else DEFAULT_MAX_TOKENS
    tensors.numbers("sampling_param_max_tokens", "INT32", limit, param="max_tokens")
    tensors.parameters(generation, _NUMBERS, lambda name: ("sampling_param_" + name,))
    if generation.stop:
        tensors.text("sampling_param_stop", *generation.stop)  # the gateway looks for them, too
    return message


class _Answer(TextDecoder):
    """Reads responses: each has the text so far, or more of it."""

    def __init__(
        self, generation: Generation, prompt: RenderedPrompt, _inputs: Collection[str], model: ModelText
    ) -> None:
        self._answer = TextAnswer(generation, model, prompt, cut_stops=True)
        self._growth = Growth()

    def decode(self, response: Response) -> list[Event]:
        """See `AnswerDecoder.decode`."""
        found = outputs(response)
        events = self._answer.accept()
        text = self._growth.push("".join(found.get("text_output", [])))
        reason = (found.get("finish_reason") or [_UNENDED])[0] or _UNENDED
        if reason != _UNENDED:
            text += self._growth.end()
        return events + self._answer.take(News(text=text, finish=None if reason == _UNENDED else reason))

    def end(self) -> list[Event]:
        """See `AnswerDecoder.end`."""
        return self._answer.take(News(text=self._growth.end())) + self._answer.end()


CONTRACT: Final = Contract(
    inputs=frozenset({"text_input", "sampling_param_max_tokens"}),
    counts=False,
    supported=_SUPPORTED,
    write=_write,
    answer=_Answer,
    streams=None,
)
