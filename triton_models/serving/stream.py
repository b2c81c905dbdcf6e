"""The Python-backend model of a stream entry."""

import logging
from typing import Any

import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models.serving.completion import complete
from triton_models.serving.inputs import Inputs
from triton_models.serving.parameters import read_parameters
from triton_models.serving.responder import TritonResponder
from triton_models.serving.stub import start_stub
from triton_models.signatures import STREAM
from wire import names
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)


class TritonPythonModel:
    """The methods that Triton calls; `StreamService` does the work."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in what a configuration leaves out; Triton calls this before `initialize`."""
        return complete(config, STREAM)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start its engine. An error fails the load, and whoever asked for it sees it."""
        # Imported here, since Triton completes configurations in a separate process, which needs no torch.
        from triton_models.serving.build import build_service  # noqa: PLC0415

        self._stub = start_stub(args)
        self._service = build_service(read_parameters(args), pb_utils)
        self._service.start()
        self._stub.initialized()

    def execute(self, requests: list[Any]) -> None:
        """Accept a batch and return at once; answers follow through each request's own response sender."""
        self._stub.asked()
        for request in requests:
            responder = TritonResponder(request, pb_utils)
            try:
                tensors = [_strings(request, name) for name in (names.PROMPT, names.HISTORY, names.SAMPLING)]
                if any(len(values) != 1 for values in tensors):
                    responder.refuse(RefusalCode.INVALID_REQUEST, "every input holds exactly one string")
                else:
                    self._service.handle(responder, Inputs(*(values[0] for values in tensors)))
            except Exception:
                # Confined to one request: an exception from `execute` would fail the whole batch and
                # send its traceback to every client.
                log.exception("a request failed in execute")
                responder.refuse(RefusalCode.INTERNAL, "the request could not be taken")

    def finalize(self) -> None:
        """Answer every open request and stop."""
        self._service.close()


def _strings(request: Any, name: str) -> list[bytes]:
    """Return the elements of a BYTES input; a client may batch several into one request."""
    values: list[bytes] = pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel().tolist()
    return values
