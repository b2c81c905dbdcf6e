"""TensorRT-LLM's `ensemble` and `tensorrt_llm_bls`: text in, text out, batched tensors.

Source of the contract: https://github.com/triton-inference-server/tensorrtllm_backend,
`all_models/inflight_batcher_llm`. There is no finish reason: an answer as long as its limit ended by it. Stop
words may stay in the text. Each response tells how many tokens are new in it, where the release has an input
to ask for that; so does a BLS model with `accumulate_tokens`, although it sends the text so far each time.
Names changed between releases: both are known here, and those that the model has are sent.
"""

import json
from collections.abc import Collection, Sequence
from typing import Final

from gateway.core.request import Generation, Grammar
from gateway.errors import InvalidRequestError
from gateway.triton.dialects.base import Request
from gateway.triton.dialects.foreign import Contract
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import Tensors
from gateway.triton.dialects.text_answer import TextOutputs, limit_of

NUMBERS: Final = {
    "temperature": "FP32",
    "top_p": "FP32",
    "top_k": "INT32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "min_tokens": "INT32",
    "seed": "UINT64",
}
"""Datatypes of the parameters that are numbers."""
_OLDER: Final = {
    "top_p": ("runtime_top_p",),
    "top_k": ("runtime_top_k",),
    "min_tokens": ("min_length",),
    "seed": ("random_seed",),
}
"""Names of their inputs in other releases."""
_GRAMMARS: Final = {
    "json_object": "json",
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "regex",
    "lark": "ebnf_grammar",
}
_SUPPORTED: Final = (*NUMBERS, "max_tokens", "stop", "bad_words", "include_stop", "ignore_eos", "priority")
NO_END: Final = -1
"""As `end_id`: no id ends the answer."""
_SPECIAL: Final = str.maketrans({sign: "\\" + sign for sign in r"\.^$|?*+()[]{}"})
"""Of the signs that mean something in regular expressions."""


def _write(
    generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], _model: ModelText
) -> Request:
    message = Request(model_name=generation.model, id=generation.request_id)
    tensors = Tensors(message, inputs, batched=True)
    tensors.text("text_input", prompt.text)
    tensors.numbers("max_tokens", "INT32", limit_of(generation), param="max_tokens")
    tensors.numbers("stream", "BOOL", generation.stream)
    tensors.flags("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
    tensors.parameters(generation, NUMBERS, names_of, seeded=True)
    if generation.ignore_eos and not tensors.numbers("end_id", "INT32", NO_END):
        raise InvalidRequestError("The model's backend does not have 'ignore_eos'.", param="ignore_eos")
    for name, words in (("stop_words", generation.stop), ("bad_words", generation.bad_words)):
        if words and not tensors.text(name, *words) and name == "bad_words":
            raise InvalidRequestError("The model's backend does not have 'bad_words'.", param=name)
    if generation.grammar is not None:
        constrain(tensors, generation.grammar)
    return message


def names_of(parameter: str) -> Sequence[str]:
    """Return the names that a parameter's input has in one release or another."""
    return (parameter, *_OLDER.get(parameter, ()))


def constrain(tensors: Tensors, grammar: Grammar) -> None:
    """Write a grammar.

    Raises:
        InvalidRequestError: the model has none of this kind.
    """
    kind = _GRAMMARS.get(grammar.kind, "")
    if not kind or not tensors.text("guided_decoding_guide_type", kind):
        raise InvalidRequestError(
            "The model's backend cannot hold an answer to such a grammar.", param=grammar.field
        )
    guide = grammar.text
    if grammar.kind == "choice":
        guide = f"({'|'.join(each.translate(_SPECIAL) for each in json.loads(guide))})"
    if guide:
        tensors.text("guided_decoding_guide", guide)


def _answer(
    generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], model: ModelText
) -> TextOutputs:
    before = "" if "exclude_input_in_output" in inputs else prompt.text
    return TextOutputs(generation, model, prompt, before=before, cut_stops=True, limit=limit_of(generation))


CONTRACT: Final = Contract(
    inputs=frozenset({"text_input", "max_tokens"}),
    supported=_SUPPORTED,
    write=_write,
    answer=_answer,
)
