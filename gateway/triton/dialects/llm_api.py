"""TensorRT-LLM's LLM-API model: text in, text out, one input for each parameter.

Source of the contract: https://github.com/NVIDIA/TensorRT-LLM, `triton_backend/all_models/llmapi`. It counts
no tokens and knows no log-probabilities and no grammars. Its text has been cumulative in some releases and
not in others, and begins with the prompt where it can be told not to. A model that is not decoupled takes no
requests for streams: it is asked for all at once.

Beside images a model takes a question, which it puts into its checkpoint's chat template itself.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Final, cast

from gateway.core.request import Conversation, Generation
from gateway.errors import InvalidRequestError
from gateway.triton.dialects.base import Request
from gateway.triton.dialects.foreign import Contract, as_text
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import Tensors
from gateway.triton.dialects.text_answer import TextOutputs, limit_of

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
_IMAGES: Final = "image_url"
_SUPPORTED: Final = (*_NUMBERS, "max_tokens", "stop", "include_stop", "priority")


def _prompt(generation: Generation, inputs: Collection[str], model: ModelText) -> RenderedPrompt:
    prompt = as_text(generation, inputs, model)
    if not prompt.images:
        return prompt
    conversation = cast("Conversation", generation.prompt)
    if len(conversation.messages) > 1 or prompt.tools or conversation.switches:
        raise InvalidRequestError(
            "The model's backend takes images in a single message only, without tools or switches.",
            param=prompt.images[0].field,
        )
    return replace(prompt, text=conversation.messages[0].content)


def _write(
    generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], _model: ModelText
) -> Request:
    if generation.grammar is not None:
        raise InvalidRequestError(
            "The model's backend cannot hold an answer to a grammar.", param=generation.grammar.field
        )
    message = Request(model_name=generation.model, id=generation.request_id)
    tensors = Tensors(message, inputs)
    tensors.text("text_input", prompt.text)
    if prompt.images:
        tensors.text(_IMAGES, *(image.url for image in prompt.images))
    tensors.numbers("streaming", "BOOL", generation.stream)
    tensors.flags("return_finish_reason", "sampling_param_exclude_input_from_output")
    tensors.numbers("sampling_param_max_tokens", "INT32", limit_of(generation), param="max_tokens")
    tensors.parameters(generation, _NUMBERS, lambda name: ("sampling_param_" + name,))
    if generation.stop and not generation.include_stop:  # the backend leaves them out
        tensors.text("sampling_param_stop", *generation.stop)  # the gateway looks for them, too
    return message


def _answer(
    generation: Generation, prompt: RenderedPrompt, _inputs: Collection[str], model: ModelText
) -> TextOutputs:
    return TextOutputs(generation, model, prompt, before="", cut_stops=True, limit=limit_of(generation))


CONTRACT: Final = Contract(
    inputs=frozenset({"text_input", "sampling_param_max_tokens"}),
    supported=_SUPPORTED,
    write=_write,
    answer=_answer,
    prompt=_prompt,
    images=_IMAGES,
    streams=None,
)
