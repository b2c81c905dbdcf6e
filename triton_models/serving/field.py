"""The Python-backend model of an entry `M`, for existing clients that predate the gateway.

Imports no torch.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models.directory import detect_format
from triton_models.errors import EntryError
from triton_models.serving.client_history import encode_history
from triton_models.serving.completion import arguments_of, check_configuration, complete
from triton_models.serving.contracts import Row
from triton_models.serving.exchange import FieldAnswer
from triton_models.serving.field_service import FieldService
from triton_models.serving.inner import LATEST, BlsCaller
from triton_models.serving.parameters import EntryParameters, read_parameters
from triton_models.serving.responder import OneResponse
from triton_models.serving.stub import start_stub
from triton_models.signatures import Contract, Signature, choose_contract, field_signature
from wire import names
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)


class TritonPythonModel:
    """The methods that Triton calls; `FieldService` does the work."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Complete a short configuration; Triton calls this before `initialize`."""
        parameters = read_parameters(arguments_of(config, pb_utils))
        return complete(config, field_signature(_contract(parameters)[0]))

    def initialize(self, args: dict[str, str]) -> None:
        """Determine the contract. An error here fails the load, and is shown to whoever requested it."""
        self._stub = start_stub(args)
        parameters = read_parameters(args)
        contract, chat_format = _contract(parameters)
        self._signature = field_signature(contract)
        check_configuration(args["model_config"], self._signature)
        caller = BlsCaller(
            names.stream_entry(parameters.model),
            parameters.version if parameters.own_version else LATEST,
            pb_utils,
        )
        self._service = FieldService(contract, chat_format, caller)
        self._service.start()
        self._stub.initialized()

    def execute(self, requests: list[Any]) -> None:
        """Accept a batch and return at once; answers follow through each request's own response sender."""
        self._stub.asked()
        for request in requests:
            responder = TritonFieldResponder(request, self._signature)
            try:
                self._service.handle(responder, _rows(request, self._signature))
            except Exception:
                # The boundary of one request: an exception leaving `execute` would fail the whole batch and
                # send its traceback to every client.
                log.exception("a request failed in execute")
                responder.refuse(RefusalCode.INTERNAL, "the request could not be taken")

    def finalize(self) -> None:
        """Stop; Triton has already waited for the open requests."""
        self._service.close()


class TritonFieldResponder(OneResponse):
    """Sends the one response to a request to `M`."""

    def __init__(self, request: Any, signature: Signature) -> None:
        super().__init__(request, pb_utils)
        self._signature = signature

    def send(self, answers: Sequence[FieldAnswer]) -> None:
        """Send `response` and `history`: BYTES [rows, 1], or without a batch dimension [1] and [any]."""
        values = {
            names.RESPONSE: [[answer.response.encode()] for answer in answers],
            names.HISTORY: [encode_history(answer.history) for answer in answers],
        }
        batched = self._signature.max_batch_size > 0
        self.respond(
            **{
                name: np.array(rows if batched else rows[0], dtype=np.object_)
                for name, rows in values.items()
            }
        )


def _contract(parameters: EntryParameters) -> tuple[Contract, str]:
    """Return the entry's contract and the checkpoint's chat format."""
    chat_format = parameters.format or detect_format(parameters.checkpoint)
    try:
        return choose_contract(parameters.contract, chat_format), chat_format
    except ValueError as error:
        raise EntryError(f"config.pbtxt parameter 'contract': {error}") from error


def _rows(request: Any, signature: Signature) -> list[Row]:
    """Return a request's rows; without a batch dimension it has one."""
    arrays = {}
    for tensor in signature.inputs:
        found = pb_utils.get_input_tensor_by_name(request, tensor.name)
        if found is not None:
            array = found.as_numpy()
            arrays[tensor.name] = array if signature.max_batch_size else array[np.newaxis]
    count = len(arrays[names.PROMPT])
    return [{name: array[row].ravel().tolist() for name, array in arrays.items()} for row in range(count)]
