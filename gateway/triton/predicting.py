"""Predictions as Triton's tensors, for one replica's entry `M`.

A client of the entry `M` may know it as a model without batching, while Triton's dynamic batcher needs a
batch dimension. So a leading dimension of 1 is added, and removed from the outputs. Everything else must be
as the model declares it.
"""

import struct

from tritonclient.grpc import service_pb2

from gateway.errors import InvalidRequestError
from gateway.prediction import InputTensor, OutputTensor, Prediction, PredictionAnswer
from gateway.triton.control import ModelMetadata, TensorMetadata
from gateway.triton.replicas import Replica
from gateway.triton.status import Fault, TritonError
from wire.strings import pack_strings


async def predict(replica: Replica, prediction: Prediction) -> PredictionAnswer:
    """Run `prediction` on the Triton of `replica`.

    Raises:
        TritonError: with any fault.
        InvalidRequestError: the model does not have such an input, or has it with another datatype.
    """
    # Asked each time: it costs a millisecond compared with an answer's seconds, and the entry may have been
    # reloaded with another contract.
    metadata = await replica.control.metadata(prediction.model)
    request = service_pb2.ModelInferRequest(
        model_name=prediction.model, model_version=prediction.version, id=prediction.request_id
    )
    unbatched = False
    for number, tensor in enumerate(prediction.inputs):
        declared = _declared(metadata, tensor, f"inputs.{number}")
        shape = tensor.shape
        if len(declared.shape) == len(shape) + 1 and declared.shape[0] == -1:
            shape, unbatched = (1, *shape), True
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(_pack(tensor))
    for name in prediction.outputs:
        request.outputs.add(name=name)
    try:
        response = await replica.channel.infer(
            request, deadline=prediction.deadline, headers=prediction.headers
        )
    except TritonError as error:
        raise error.blame_client() from error
    return _read(response, without_batch=unbatched)


def _declared(metadata: ModelMetadata, tensor: InputTensor, path: str) -> TensorMetadata:
    declared = metadata.inputs.get(tensor.name)
    if declared is None:
        raise InvalidRequestError(
            f"{path}.name: the model has no input {tensor.name!r}; it has {', '.join(metadata.inputs)}.",
            param=f"{path}.name",
        )
    if declared.datatype != tensor.datatype:
        raise InvalidRequestError(
            f"{path}.datatype: {tensor.name} is {declared.datatype}, not {tensor.datatype}.",
            param=f"{path}.datatype",
        )
    return declared


def _pack(tensor: InputTensor) -> bytes:
    if tensor.datatype == "BYTES":
        return pack_strings(value for value in tensor.values if isinstance(value, bytes))
    return struct.pack(f"<{len(tensor.values)}h", *tensor.values)


def _read(response: service_pb2.ModelInferResponse, *, without_batch: bool) -> PredictionAnswer:
    if len(response.outputs) != len(response.raw_output_contents):
        raise TritonError(Fault.PROTOCOL, "outputs without contents")
    return PredictionAnswer(
        version=response.model_version,
        outputs=tuple(
            OutputTensor(
                name=tensor.name,
                datatype=tensor.datatype,
                shape=tuple(tensor.shape)[1 if without_batch else 0 :],
                raw=raw,
            )
            for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        ),
    )
