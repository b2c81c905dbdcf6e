"""The tensors of Triton's official vLLM backend: a model's interface, and what one request holds.

Source of the contract: https://github.com/triton-inference-server/vllm_backend, README.md and
`docs/additional_outputs.md`. No tensor has a batch dimension.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from triton_models.errors import InvalidRequestError

TEXT_INPUT: Final = "text_input"
REPORTS: Final = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
"""Outputs that a request asks for, each with a BOOL input `return_NAME`."""

_INPUTS: Final = {
    TEXT_INPUT: ("TYPE_STRING", 1),
    "image": ("TYPE_STRING", -1),
    "stream": ("TYPE_BOOL", 1),
    "sampling_parameters": ("TYPE_STRING", 1),
    "exclude_input_in_output": ("TYPE_BOOL", 1),
    **{f"return_{name}": ("TYPE_BOOL", 1) for name in REPORTS},
    "embedding_request": ("TYPE_STRING", 1),
}
"""Datatype and size of each input; all but the text are optional."""
_OUTPUTS: Final = {
    "text_output": ("TYPE_STRING", -1),
    "finish_reason": ("TYPE_STRING", -1),
    "cumulative_logprob": ("TYPE_FP32", -1),
    "logprobs": ("TYPE_STRING", -1),
    "num_input_tokens": ("TYPE_UINT32", 1),
    "num_output_tokens": ("TYPE_UINT32", -1),
}


def complete(config: Any) -> Any:
    """Fill in what Triton's `ModelConfig` object leaves out: usually all but the backend and the instances.

    Raises:
        ValueError: raised by Triton's object: the configuration contradicts the interface.
    """
    declared = config.as_dict()
    inputs = {tensor["name"] for tensor in declared["input"]}
    outputs = {tensor["name"] for tensor in declared["output"]}
    for name, (datatype, size) in _INPUTS.items():
        if name not in inputs:
            optional = name != TEXT_INPUT
            config.add_input({"name": name, "data_type": datatype, "dims": [size], "optional": optional})
    for name, (datatype, size) in _OUTPUTS.items():
        if name not in outputs:
            config.add_output({"name": name, "data_type": datatype, "dims": [size]})
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A request for text.

    Attributes:
        prompt: as text; vLLM tokenizes it.
        images: of the prompt, as files: JPEG, PNG or what else Pillow reads.
        stream: whether each step's text is a response, instead of all text one.
        prepend: whether the answer begins with the prompt.
        parameters: of vLLM's SamplingParams by their names, and `lora_name`.
        reports: of `REPORTS`, those that are asked for.
    """

    prompt: str
    images: tuple[bytes, ...]
    stream: bool
    prepend: bool
    parameters: Mapping[str, Any]
    reports: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A request for the embedding of a text or of token ids."""

    prompt: str | list[int]
    dimensions: int | None
    reports: frozenset[str]


Values = Mapping[str, list[Any]]
"""What a request's tensors hold, strings as bytes, by their names."""


def read_request(values: Values, parameters: str) -> TextRequest | EmbeddingRequest:
    """Read a request.

    Args:
        values: of its input tensors, none of which is empty.
        parameters: the request's own parameters, a JSON object, which count where there is no tensor
            `sampling_parameters`.

    Raises:
        InvalidRequestError: a value is not what its tensor is for.
    """

    def flag(name: str) -> bool | None:
        return bool(values[name][0]) if name in values else None

    reports = frozenset(name for name in REPORTS if flag(f"return_{name}"))
    if "embedding_request" in values:
        return _embedding(_document("embedding_request", _text("embedding_request", values)), reports)
    if TEXT_INPUT not in values:
        raise InvalidRequestError("text_input is missing")
    stream = flag("stream") or False
    exclude = flag("exclude_input_in_output")
    if stream and exclude is False:
        raise InvalidRequestError("exclude_input_in_output cannot be false where stream is true")
    if "sampling_parameters" in values:
        parameters = _text("sampling_parameters", values)
    return TextRequest(
        prompt=_text(TEXT_INPUT, values),
        images=tuple(map(_image, values.get("image", ()))),
        stream=stream,
        prepend=not stream and not exclude,
        parameters=_document("sampling_parameters", parameters or "{}"),
        reports=reports,
    )


def _text(name: str, values: Values) -> str:
    try:
        return bytes(values[name][0]).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8: {error}") from None


def _document(name: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{name} is not a JSON object")
    return document


def _image(value: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(value.split()), validate=True)
    except binascii.Error as error:
        raise InvalidRequestError(f"image is not base64: {error}") from None


def _embedding(document: dict[str, Any], reports: frozenset[str]) -> EmbeddingRequest:
    prompt: Any = document.get("input")
    ids = isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt)
    if not isinstance(prompt, str) and not ids:
        raise InvalidRequestError("embedding_request: input is neither a text nor a list of token ids")
    options = document.get("pooling_params") or {}
    dimensions = options.get("dimensions") if isinstance(options, dict) else options
    if isinstance(dimensions, list):  # as the official front end writes it
        dimensions = dimensions[0] if len(dimensions) == 1 else "several"
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidRequestError("embedding_request: dimensions is not a number")
    return EmbeddingRequest(prompt=prompt, dimensions=dimensions, reports=reports)


@dataclass(slots=True)
class Progress:
    """What was sent of one answer. Makes each response's output tensors, by their names.

    Args:
        request: what was asked for.
        choices: the number of answers to it.
    """

    request: TextRequest
    choices: int
    _reasons: list[str] | None = None
    """The finish reasons so far; the contract's word for none is `None`."""
    _logprobs: list[float] | None = None
    """The cumulative log-probabilities so far."""

    def outputs(self, output: Any) -> dict[str, list[Any]]:
        """Return what is new in vLLM's RequestOutput, of kind DELTA or FINAL_ONLY, for each choice.

        vLLM names only the choices that moved; the others get an empty text and no tokens.
        """
        count = self.choices
        texts, tokens, listed = [""] * count, [0] * count, ["null"] * count
        reasons = self._reasons = self._reasons or ["None"] * count
        sums = self._logprobs = self._logprobs or [0.0] * count
        for choice in output.outputs:
            at = choice.index
            texts[at] = choice.text
            tokens[at] = len(choice.token_ids)
            reasons[at] = str(choice.finish_reason)
            sums[at] = sums[at] if choice.cumulative_logprob is None else choice.cumulative_logprob
            listed[at] = (
                "null" if choice.logprobs is None else json.dumps(list(map(_entries, choice.logprobs)))
            )
        if self.request.prepend:
            texts = [self.request.prompt + text for text in texts]
        found: dict[str, list[Any]] = {
            "text_output": [text.encode() for text in texts],
            "finish_reason": [reason.encode() for reason in reasons],
            "cumulative_logprob": list(sums),
            "logprobs": [each.encode() for each in listed],
            "num_input_tokens": [len(output.prompt_token_ids or ())],
            "num_output_tokens": tokens,
        }
        wanted = {"text_output", *self.request.reports}
        return {name: values for name, values in found.items() if name in wanted}


def _entries(entries: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Return a token's log-probabilities as the contract writes them: the sampled token comes first."""
    return {
        id_: {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for id_, entry in entries.items()
    }


def embedding_outputs(
    request: EmbeddingRequest, values: list[float], prompt_tokens: int
) -> dict[str, list[Any]]:
    """Return the output tensors of an embedding: JSON numbers as text, and the counts that are asked for."""
    counts = {"num_input_tokens": [prompt_tokens], "num_output_tokens": [0]}
    wanted = {name: count for name, count in counts.items() if name in request.reports}
    return {"text_output": [json.dumps(values).encode()], **wanted}
