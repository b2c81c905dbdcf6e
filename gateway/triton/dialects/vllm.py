"""Triton's official vLLM backend: text in, deltas of text out, parameters as JSON.

Source of the contract: https://github.com/triton-inference-server/vllm_backend, `docs/additional_outputs.md`
and `src/utils/request.py`. Tensors have no batch dimension; names are added in every release, and a request
sends only those that the model has. Before there was `exclude_input_in_output`, an answer began with its
prompt; of such a model neither finish reasons nor token counts are known.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from gateway.core.events import TokenLogprob, TopLogprob
from gateway.core.request import Generation, Grammar
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects import embeddings
from gateway.triton.dialects.base import Request
from gateway.triton.dialects.foreign import Contract
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import Tensors
from gateway.triton.dialects.text_answer import TextOutputs

_SAME: Final = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "allowed_token_ids", "logprobs",
)  # fmt: skip
"""Parameters that vLLM's SamplingParams call the same."""
_LATER: Final = ("min_tokens", "bad_words")
"""Those of them that not all releases have: sent where they change something."""
_SUPPORTED: Final = (
    *_SAME, *_LATER, "max_tokens", "top_k", "logit_bias", "include_stop", "show_special", "priority",
)  # fmt: skip
_WHOLE_CONTEXT: Final = 2**31 - 1
"""As `max_tokens`: the context alone limits, and vLLM sees to that. The backend cannot read null."""
_EVERY_TOKEN: Final = -1
"""As `top_k`: in all releases, of which older ones refuse 0."""
_REPORTS: Final = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_GRAMMARS: Final = {"json_schema": "json", "regex": "regex", "choice": "choice", "lark": "grammar"}
"""Fields of vLLM's StructuredOutputsParams, formerly GuidedDecodingParams, by the kinds of grammars."""
_LOGPROB_FLOOR: Final = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold."""
_EXCLUDES: Final = "exclude_input_in_output"
_IMAGES: Final = "image"


def _write(
    generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], _model: ModelText
) -> Request:
    message = Request(model_name=generation.model, id=generation.request_id)
    tensors = Tensors(message, inputs)
    tensors.text("text_input", prompt.text)
    tensors.numbers("stream", "BOOL", generation.stream)
    if prompt.images:
        tensors.text(_IMAGES, *(image.data for image in prompt.images))
    parameters = _parameters(generation, prompt, inputs)
    tensors.text("sampling_parameters", json.dumps(parameters, ensure_ascii=False))
    tensors.flags(_EXCLUDES, *_REPORTS)
    if generation.logprobs is not None and not tensors.flags("return_logprobs"):
        raise InvalidRequestError("The model's backend has no log-probabilities.", param="logprobs")
    return message


def _parameters(generation: Generation, prompt: RenderedPrompt, inputs: Collection[str]) -> dict[str, Any]:
    """Return vLLM's sampling parameters; those at our defaults too, since vLLM's may be the model's own."""
    parameters = {name: getattr(generation, name) for name in _SAME}
    limit, top_k = generation.max_tokens, generation.top_k
    parameters["max_tokens"] = _WHOLE_CONTEXT if limit is None else limit
    parameters["top_k"] = top_k or _EVERY_TOKEN
    parameters |= {name: value for name in _LATER if (value := getattr(generation, name))}
    parameters["include_stop_str_in_output"] = generation.include_stop
    parameters["skip_special_tokens"] = not generation.show_special
    parameters["lora_name"] = generation.adapter
    if generation.logit_bias:
        parameters["logit_bias"] = {str(id_): bias for id_, bias in generation.logit_bias.items()}
    structured = None if generation.grammar is None else _structured(generation.grammar)
    if prompt.tagged is not None:
        structured = {"structural_tag": json.dumps(prompt.tagged, ensure_ascii=False)}
    if structured is not None:
        # Renamed in the release that began to embed, 25.11: each takes its own name only.
        name = "structured_outputs" if embeddings.REQUEST in inputs else "guided_decoding"
        parameters[name] = json.dumps(structured)
    return {name: value for name, value in parameters.items() if value is not None}


def _structured(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"json_object": True}
    text = json.loads(grammar.text) if grammar.kind in ("json_schema", "choice") else grammar.text
    return {_GRAMMARS[grammar.kind]: text}


class _Answer(TextOutputs):
    """Reads responses: one a step where they stream, else one with everything."""

    def __init__(
        self, generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], model: ModelText
    ) -> None:
        before = None if _EXCLUDES in inputs else prompt.text
        limit = generation.max_tokens
        super().__init__(generation, model, prompt, before=before, cut_stops=False, limit=limit)

    def logprobs_in(self, found: Mapping[str, Sequence[Any]]) -> tuple[TokenLogprob, ...] | None:
        """Read a JSON list with an object for each token: the sampled one's entry comes first."""
        document, count = next(iter(found.get("logprobs", ())), None), self._generation.logprobs
        if count is None or not document:
            return None
        try:
            return tuple(_logprob(each, count) for each in json.loads(document) or ())
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise UpstreamProtocolError("The model's log-probabilities cannot be read.") from error


def _logprob(entries: Mapping[str, Mapping[str, Any]], count: int) -> TokenLogprob:
    # U+FFFD stands for part of a character, which the text has with the token that completes it.
    every: Sequence[TopLogprob] = [
        TopLogprob(
            id=int(id_), token=text, utf8=text.strip("\ufffd").encode(), logprob=max(_LOGPROB_FLOOR, logprob)
        )
        for id_, entry in entries.items()
        for text, logprob in ((entry.get("decoded_token") or "", float(entry["logprob"])),)
    ]
    sampled = every[0]
    ranked = sorted(every, key=lambda each: -each.logprob)
    return TokenLogprob(
        id=sampled.id,
        token=sampled.token,
        utf8=sampled.utf8,
        logprob=sampled.logprob,
        top=tuple(ranked[:count]),
    )


CONTRACT: Final = Contract(
    inputs=frozenset({"text_input", "sampling_parameters"}),
    supported=_SUPPORTED,
    write=_write,
    answer=_Answer,
    embedder=embeddings.of_vllm,
    images=_IMAGES,
    adapters=True,
    tags=True,
)
