"""The Python-backend model of a tokenizer entry."""

import logging
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models.directory import vocabulary_size
from triton_models.serving.chat_text import load_text
from triton_models.serving.completion import complete
from triton_models.serving.parameters import read_parameters
from triton_models.serving.responder import refusal_response
from triton_models.serving.stub import start_stub
from triton_models.serving.tokenizer_service import LONGEST_WAIT_S, TokenizerService
from triton_models.serving.tokenizing import Tokenized
from triton_models.signatures import TOKENIZER
from wire import names
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)


class TritonPythonModel:
    """The methods that Triton calls; `TokenizerService` does the work. Loads no weights."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in what a configuration leaves out; Triton calls this before `initialize`."""
        return complete(config, TOKENIZER)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        start_stub()
        parameters = read_parameters(args)
        text = load_text(parameters)
        vocabulary = max(text.tokenizer.size, vocabulary_size(parameters.checkpoint))
        self._service = TokenizerService(text, vocabulary)
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests and return at once; answers follow through each one's own response sender."""
        for request in requests:
            responder = TritonTokenizerResponder(request)
            try:
                document = pb_utils.get_input_tensor_by_name(request, names.REQUEST).as_numpy()[0]
                # In microseconds; 0: the client set no time limit.
                wait_s = request.timeout() / 1e6 or LONGEST_WAIT_S
                self._service.handle(responder, document, wait_s)
            except Exception:
                # The boundary of one request: an exception leaving `execute` would send its traceback to the
                # client.
                log.exception("a request failed in execute")
                responder.refuse(RefusalCode.INTERNAL, "the request could not be taken")

    def finalize(self) -> None:
        """Stop; Triton has already waited for the open requests."""
        self._service.close()


class TritonTokenizerResponder:
    """Sends the one response to a request that is not decoupled, after `execute` has returned.

    It does not hold the request, and with it the input's place in the memory shared with Triton.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, done: Tokenized) -> None:
        """Send `input_ids`, `attention_mask` (INT64 [any]), `text` (BYTES [1]) and `tokens` (BYTES [any])."""
        tensors = [
            pb_utils.Tensor(names.INPUT_IDS, np.array(done.ids, dtype=np.int64)),
            pb_utils.Tensor(names.ATTENTION_MASK, np.ones(len(done.ids), dtype=np.int64)),
            pb_utils.Tensor(names.TEXT, _strings([done.text])),
        ]
        if done.strings is not None:
            tensors.append(pb_utils.Tensor(names.TOKENS, _strings(done.strings)))
        self._respond(pb_utils.InferenceResponse(output_tensors=tensors))

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error with the status that fits `code`. Never raises."""
        try:
            self._respond(refusal_response(code, message, pb_utils))
        except Exception:
            # The boundary to Triton: the caller must go on to its other requests.
            log.exception("a refusal could not be sent")

    def cancelled(self) -> bool:
        """Ask Triton, which takes some 50 microseconds."""
        return bool(self._sender.is_cancelled())

    def _respond(self, response: Any) -> None:
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _strings(values: list[str]) -> Any:
    return np.array([value.encode() for value in values], dtype=np.object_)
