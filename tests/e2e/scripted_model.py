"""A stream entry's `1/model.py` that does what its prompt says, to see how Triton carries each failure.

`refuse CODE`, `raise`, `block` (inside execute, as long as there is a file `blocking` in the entry's folder,
which it makes), `hang` (accepted, then nothing until cancelled, which is noted by a file `cancelled` there),
`beat` (the same with heartbeats), `die`; anything else is answered by itself. It is loading as long as there
is a file `hold` in the folder.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from triton_models.serving.responder import TritonResponder

from wire import names
from wire.meta import Accepted, Meta, ProbeReport, Usage
from wire.refusal import RefusalCode
from wire.sampling import Probe, decode_sampling

ACCEPTED = Meta(accepted=Accepted(request_id="r", prompt_tokens=1))
LAST = Meta(tokens=1, finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1))
REPORT = ProbeReport(heartbeat_age_s=0, running=0, waiting=0, format="chatglm3", max_context=8)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.folder = Path(args["model_repository"])
        while (self.folder / "hold").exists():
            time.sleep(0.05)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            prompt, document = (_string(request, name) for name in (names.PROMPT, names.SAMPLING))
            responder = TritonResponder(request, pb_utils)
            if isinstance(decode_sampling(document), Probe):
                responder.send("", Meta(probe=REPORT), final=True)
            else:
                self._obey(*prompt.decode().partition(" ")[::2], request, responder)

    def _obey(self, word: str, argument: str, request: Any, responder: TritonResponder) -> None:
        if word == "refuse":
            responder.refuse(RefusalCode(argument), "why")
        elif word == "raise":
            raise ValueError("secret")
        elif word == "die":
            os._exit(1)
        elif word in {"hang", "beat"}:
            thread = threading.Thread(target=self._last, args=(responder,), kwargs={"beat": word == "beat"})
            thread.start()
        else:
            if word == "block":
                (self.folder / "blocking").touch()
                while (self.folder / "blocking").exists():
                    time.sleep(0.05)
            responder.send("", ACCEPTED, final=False)
            responder.send(word, LAST, final=True)

    def _last(self, responder: TritonResponder, *, beat: bool) -> None:
        responder.send("", ACCEPTED, final=False)
        while not responder.cancelled():
            time.sleep(0.05)
            if beat:
                responder.send("", Meta(), final=False)
        (self.folder / "cancelled").touch()
        responder.refuse(RefusalCode.CANCELLED, "as asked")


def _string(request: Any, name: str) -> bytes:
    value: bytes = np.ravel(pb_utils.get_input_tensor_by_name(request, name).as_numpy())[0]
    return value
