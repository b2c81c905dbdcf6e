"""The Python-backend model of a repository entry."""

from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models import signature
from triton_models.options import read_parameters
from triton_models.serving.stub import Stub, keep_what_is_loaded, uncollected


class TritonPythonModel:
    """The methods that Triton calls; `Service` does the work."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in what a configuration leaves out; Triton calls this before `initialize`."""
        return signature.complete(config)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start its engine. An error fails the load, and whoever asked for it sees it."""
        # Imported here, since Triton completes configurations in a separate process, which needs no torch.
        with uncollected():
            from triton_models.serving.build import build_service  # noqa: PLC0415
            from triton_models.serving.intake import read_arrival  # noqa: PLC0415

        self._stub = Stub(args)
        parameters = read_parameters(args)
        self._read = partial(read_arrival, pb_utils=pb_utils, traced="trace_endpoint" in parameters.options)
        self._service = build_service(parameters, pb_utils)
        keep_what_is_loaded()
        self._service.start()
        self._stub.initialized()

    def execute(self, requests: list[Any]) -> None:
        """Hand a batch over and return at once. Other threads answer; nothing refers to `requests` any more.

        It neither sends nor raises: an exception would fail the whole batch, and send its traceback to every
        client.
        """
        self._stub.requested()
        arrivals = map(self._read, requests)
        self._service.submit([arrival for arrival in arrivals if arrival is not None])

    def finalize(self) -> None:
        """Answer every open request and stop."""
        self._service.close()
