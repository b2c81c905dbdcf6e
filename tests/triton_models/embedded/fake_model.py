"""An entry's `1/model.py` without an engine, for tests of what surrounds it.

Its checkpoint is a folder whose files say how it behaves: `broken` fails the load, `stopped` makes the
heartbeat old of an engine that was loaded before it came, and of no later one; a load lasts as long as there
is `slow`, and writes its process id to `loading`. The prompt `hang` is accepted and never answered. A process
that Triton gave up ends sooner than a real one.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from triton_models.errors import CheckpointError
from triton_models.serving import stub
from triton_models.serving.stub import Stub
from wire import names
from wire.meta import Accepted, Meta, ProbeReport, Usage, encode_meta
from wire.request import Cancel, Probe, decode_request

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
stub.UNREQUESTED_LIMIT_S = 2.0


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.stub = Stub(args)
        parameters = json.loads(args["model_config"])["parameters"]
        self.checkpoint = Path(parameters["checkpoint"]["string_value"])
        self.loaded_at = time.time()
        if (self.checkpoint / "broken").exists():
            raise CheckpointError(f"{self.checkpoint}/model.safetensors: tensor 'a.b' is cut short")
        if (self.checkpoint / "slow").exists():
            (self.checkpoint / "loading").write_text(str(os.getpid()))
        while (self.checkpoint / "slow").exists():
            time.sleep(0.05)
        self.stub.initialized()

    def execute(self, requests: list[Any]) -> None:
        self.stub.requested()
        for request in requests:
            sender = request.get_response_sender()
            prompt, document = (_string(request, name) for name in (names.PROMPT, names.SAMPLING))
            wanted = decode_request(document)
            if isinstance(wanted, Probe):
                age = 1e6 if self._stopped() else 0.0
                report = ProbeReport(
                    heartbeat_age_s=age, running=0, waiting=0, format="chatglm3", max_context=1
                )
                sender.send(_response("", Meta(probe=report)), FINAL)
            elif isinstance(wanted, Cancel):
                sender.send(_response("", Meta(cancelled=False)), FINAL)
            elif prompt == b"hang":
                sender.send(_response("", Meta(accepted=Accepted(request_id="r", prompt_tokens=1))))
                threading.Thread(target=_await_cancel, args=(request, sender), daemon=True).start()
            else:
                usage = Usage(prompt_tokens=1, completion_tokens=1)
                sender.send(_response("x", Meta(tokens=1, finish_reason="length", usage=usage)), FINAL)

    def _stopped(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return (self.checkpoint / "stopped").stat().st_mtime > self.loaded_at
        return False


def _await_cancel(request: Any, sender: Any) -> None:
    while not request.is_cancelled():
        threading.Event().wait(0.05)
    sender.send(flags=FINAL)


def _string(request: Any, name: str) -> bytes:
    value: bytes = pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
    return value


def _response(text: str, meta: Meta) -> Any:
    tensors = {names.RESPONSE: text.encode(), names.META: encode_meta(meta)}
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(k, np.array([[v]], dtype=np.object_)) for k, v in tensors.items()]
    )
