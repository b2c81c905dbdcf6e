"""The Python-backend model of a tokenizer entry."""

import logging
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models.directory import vocabulary_size
from triton_models.serving.chat_text import load_text
from triton_models.serving.completion import complete
from triton_models.serving.parameters import read_parameters
from triton_models.serving.responder import OneResponse
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
        self._stub = start_stub(args)
        parameters = read_parameters(args)
        text = load_text(parameters)
        vocabulary = max(text.tokenizer.size, vocabulary_size(parameters.checkpoint))
        self._service = TokenizerService(text, vocabulary)
        self._service.start()
        self._stub.initialized()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests and return at once; answers follow through each one's own response sender."""
        self._stub.asked()
        for request in requests:
            responder = TritonTokenizerResponder(request, pb_utils)
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


class TritonTokenizerResponder(OneResponse):
    """Sends the one response to a request to the tokenizer."""

    def send(self, done: Tokenized) -> None:
        """Send `input_ids`, `attention_mask` (INT64 [any]), `text` (BYTES [1]) and `tokens` (BYTES [any])."""
        values = {
            names.INPUT_IDS: np.array(done.ids, dtype=np.int64),
            names.ATTENTION_MASK: np.ones(len(done.ids), dtype=np.int64),
            names.TEXT: _strings([done.text]),
        }
        if done.strings is not None:
            values[names.TOKENS] = _strings(done.strings)
        self.respond(**values)


def _strings(values: list[str]) -> Any:
    return np.array([value.encode() for value in values], dtype=np.object_)
