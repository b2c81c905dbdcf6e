"""Models that embed: Triton's vLLM backend, and a plain model with a text in and a vector out.

The vLLM backend takes an `embedding_request`, as https://github.com/triton-inference-server/vllm_backend,
`src/utils/request.py`, reads it, whatever model it serves; one that does not embed says so. Of plain models,
as the Python backend and ensembles serve them, there is no agreed contract: one has a single input, of text,
and an output of numbers whose name has "embed" in it.
"""

import json
from collections.abc import Collection, Sequence
from math import prod
from typing import Final, NoReturn

from tritonclient.grpc import service_pb2

from gateway.chat.vocabulary import Vocabulary
from gateway.core.request import TokenIds
from gateway.core.upstream import Embedding, Vector
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects.base import Dialect, Embedder, Request, Response
from gateway.triton.dialects.tensors import Tensors, outputs
from wire.strings import pack_strings

REQUEST: Final = "embedding_request"
_NUMBERS: Final = ("FP16", "FP32", "FP64")


def of_vllm(inputs: Collection[str]) -> Embedder | None:
    """Return what embeds with a model of the vLLM backend; None: its release cannot."""
    if REQUEST not in inputs:
        return None

    def request(embedding: Embedding) -> Request:
        message = Request(model_name=embedding.model, id=embedding.request_id)
        tensors = Tensors(message, inputs)
        given = embedding.prompt
        document: dict[str, object] = {"input": given.ids if isinstance(given, TokenIds) else given.text}
        if embedding.dimensions is not None:
            document["pooling_params"] = {"dimensions": [embedding.dimensions]}
        tensors.text("text_input", "")  # which the model must have, and does not read
        tensors.text(REQUEST, json.dumps(document, ensure_ascii=False))
        tensors.flags("return_num_input_tokens")
        return message

    def read(embedding: Embedding, responses: Sequence[Response]) -> Vector:
        found = outputs(_only(responses))
        try:
            values = json.loads(found["text_output"][0])
            vector = Vector(values=[float(value) for value in values], tokens=found["num_input_tokens"][0])
        except (LookupError, TypeError, ValueError) as error:
            raise UpstreamProtocolError("The model's embedding cannot be read.") from error
        if embedding.dimensions not in (None, len(vector.values)):
            raise UpstreamProtocolError("The model's embedding has not the dimensions that were asked for.")
        return vector

    return Embedder(request, read)


def vector_output(metadata: service_pb2.ModelMetadataResponse) -> str | None:
    """Return the name of the output of a plain embedding model; None: it is none."""
    named = [each for each in metadata.outputs if "embed" in each.name.lower()]
    vectors = [each.name for each in named if each.datatype in _NUMBERS]
    if len(metadata.inputs) != 1 or metadata.inputs[0].datatype != "BYTES" or len(vectors) != 1:
        return None
    return str(vectors[0])


def plain_model(metadata: service_pb2.ModelMetadataResponse, output: str, vocabulary: Vocabulary) -> Dialect:
    """Return the dialect of a plain embedding model, whose tokens `vocabulary` counts."""
    given = metadata.inputs[0]

    def request(embedding: Embedding) -> Request:
        if isinstance(embedding.prompt, TokenIds):
            raise InvalidRequestError("The model takes text only.", param="input")
        if embedding.dimensions is not None:
            raise InvalidRequestError("The model's vectors have one length.", param="dimensions")
        message = Request(model_name=embedding.model, id=embedding.request_id)
        message.inputs.add(name=given.name, datatype="BYTES", shape=[1] * len(given.shape))
        message.raw_input_contents.append(pack_strings([embedding.prompt.text.encode()]))
        message.outputs.add(name=output)
        return message

    def read(embedding: Embedding, responses: Sequence[Response]) -> Vector:
        response = _only(responses)
        values = outputs(response).get(output, [])
        if not values or prod(response.outputs[0].shape[:-1]) != 1:
            raise UpstreamProtocolError("The model's answer is not one vector.")
        text = getattr(embedding.prompt, "text", "")
        return Vector(values=values, tokens=vocabulary.count_prompt(text))

    return Dialect(
        name="embedding",
        inputs=frozenset({given.name}),
        request=_refuse,
        decoder=_refuse,
        embedder=Embedder(request, read),
        heartbeats=False,
    )


def _only(responses: Sequence[Response]) -> Response:
    if len(responses) != 1:
        raise UpstreamProtocolError(f"The model answered an embedding with {len(responses)} responses.")
    return responses[0]


def _refuse(*_generation: object) -> NoReturn:
    raise InvalidRequestError("The model writes no text: it embeds, at /v1/embeddings.", param="model")
