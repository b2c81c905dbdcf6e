"""The Python-backend model of a tokenizer entry."""

import logging
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models.directory import vocabulary_size
from triton_models.errors import ModelError
from triton_models.serving.chat_text import load_text
from triton_models.serving.completion import complete
from triton_models.serving.parameters import read_parameters
from triton_models.serving.stub import start_stub
from triton_models.serving.tokenizing import tokenize
from triton_models.signatures import TOKENIZER
from wire import names
from wire.refusal import RefusalCode, refusal_text
from wire.tokenizing import decode_tokenizing

log = logging.getLogger(__name__)


class TritonPythonModel:
    """Tokenises, renders and decodes; loads no weights."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in what a configuration leaves out; Triton calls this before `initialize`."""
        return complete(config, TOKENIZER)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        start_stub()
        parameters = read_parameters(args)
        self._text = load_text(parameters)
        self._vocabulary = max(self._text.tokenizer.size, vocabulary_size(parameters.checkpoint))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; an invalid one gets an error of its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            document = pb_utils.get_input_tensor_by_name(request, names.REQUEST).as_numpy()[0]
            done = tokenize(self._text, decode_tokenizing(document), self._vocabulary)
        except (ModelError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _refusal(RefusalCode.INVALID_REQUEST, str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception:
            # The boundary of one request: an exception out of `execute` sends its traceback to the client.
            log.exception("a request to the tokenizer failed")
            return _refusal(RefusalCode.INTERNAL, "the request failed", pb_utils.TritonError.INTERNAL)
        tensors = [
            pb_utils.Tensor(names.INPUT_IDS, np.array(done.ids, dtype=np.int64)),
            pb_utils.Tensor(names.ATTENTION_MASK, np.ones(len(done.ids), dtype=np.int64)),
            pb_utils.Tensor(names.TEXT, _strings([done.text])),
        ]
        if done.strings is not None:
            tensors.append(pb_utils.Tensor(names.TOKENS, _strings(done.strings)))
        return pb_utils.InferenceResponse(output_tensors=tensors)


def _strings(values: list[str]) -> Any:
    return np.array([value.encode() for value in values], dtype=np.object_)


def _refusal(code: RefusalCode, message: str, status: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(refusal_text(code, message), status))
