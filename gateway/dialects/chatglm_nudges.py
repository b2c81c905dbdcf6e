"""Requests of our own contract that cost a model next to nothing: see `gateway.triton.unheard`."""

from tritonclient.grpc import service_pb2

from gateway.dialects.chatglm import infer_request
from wire import names
from wire.sampling import Probe, encode_sampling
from wire.strings import pack_strings
from wire.tokenizing import Tokenizing, encode_tokenizing

_NUDGE_ID = "nudge"
_NOTHING = b""


class ChatGLMNudges:
    """Nudges for a model's entries; stateless."""

    def streamed(self, model: str) -> service_pb2.ModelInferRequest:
        """Return a probe."""
        sampling = encode_sampling(Probe(probe=True))
        return infer_request(model, _NUDGE_ID, names.URGENT_PRIORITY, (_NOTHING, _NOTHING, sampling))

    def whole(self, model: str) -> service_pb2.ModelInferRequest:
        """Return a request for the tokens of no text."""
        request = service_pb2.ModelInferRequest(model_name=names.tokenizer_entry(model), id=_NUDGE_ID)
        request.parameters["priority"].uint64_param = names.URGENT_PRIORITY
        request.inputs.add(name=names.REQUEST, datatype="BYTES", shape=(1,))
        request.outputs.add(name=names.INPUT_IDS)
        request.raw_input_contents.append(pack_strings([encode_tokenizing(Tokenizing(text=""))]))
        return request
