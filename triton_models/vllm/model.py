"""The Python-backend model of an entry that vLLM serves, or of Triton's backend `vllm`."""

import contextlib
import json
import locale
import logging
from typing import Any

import triton_python_backend_utils as pb_utils  # Only importable inside Triton's stub.

from triton_models.serving.outbox import Responder
from triton_models.serving.stub import Stub, keep_what_is_loaded, uncollected
from triton_models.vllm import tensors
from triton_models.vllm.options import read_options
from triton_models.vllm.service import Arrival, Call, Service

log = logging.getLogger(__name__)


class TritonPythonModel:
    """The methods that Triton calls; `Service` does the work."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in what a configuration leaves out; Triton calls this before `initialize`."""
        return tensors.complete(config)

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine. An error fails the load, and whoever asked for it sees it."""
        self._stub = Stub(args)
        options = read_options(args)
        with contextlib.suppress(locale.Error):
            # Unlike `python3`, a stub in a container without a locale reads files as ASCII; torch's are not.
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        # Imported here, since Triton completes configurations in a separate process, which needs no vLLM.
        with uncollected():
            from triton_models.vllm.engine import Engine  # noqa: PLC0415

        def died() -> None:
            if options.health_check:
                pb_utils.unload_model(options.model)

        self._service = Service(lambda: Engine(options), died)
        keep_what_is_loaded()  # as vLLM's own server
        self._metrics = None
        if options.metrics:
            from triton_models.vllm.metrics import Metrics  # noqa: PLC0415

            self._metrics = Metrics(pb_utils.MetricFamily, model=options.model, version=options.version)
            self._metrics.start()
        self._stub.initialized()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests over and return at once. Other threads answer; nothing refers to `requests` then."""
        self._stub.requested()
        self._service.submit(list(map(_arrival, requests)))

    def finalize(self) -> None:
        """Answer every open request and stop."""
        if self._metrics is not None:
            self._metrics.stop()
        self._service.close()


def _arrival(request: Any) -> Arrival:
    """Copy what a request holds, which lies in the memory shared with the server."""
    call = Call("request", Responder(request.get_response_sender(), pb_utils))
    try:
        values = {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()}
        return Arrival(call, values, _own_parameters(request))
    except Exception:
        # Confined to one request: an exception out of `execute` would fail all of them.
        log.exception("a request cannot be read")
        return Arrival(call, None)


def _own_parameters(request: Any) -> str:
    """Return a request's parameters without those that are Triton's own."""
    own = json.loads(request.parameters() or "{}")
    return json.dumps({name: value for name, value in own.items() if not name.startswith("triton_")})
