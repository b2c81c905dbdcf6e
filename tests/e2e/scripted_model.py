"""A `1/model.py` that does what its prompt says, to see how Triton carries each failure.

`refuse CODE`, `raise`, `hang` (accepted, then nothing until told to cancel, which is noted by a file
`cancelled-…` in the entry's folder), `beat` (the same with heartbeats), `die`; anything else is answered by
itself, over the channel if the request names one. The tokens of a text are its characters. It is loading as
long as there is a file `hold` in the folder.
"""

import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from wire import names
from wire.channel import Frame, encode_frame
from wire.meta import Accepted, Delivered, Meta, ProbeReport, Tokenized, Usage, encode_meta
from wire.refusal import RefusalCode, refusal_text
from wire.request import Cancel, Detokenize, Generation, OpenChannel, Probe, Tokenize, decode_request

ACCEPTED = Meta(accepted=Accepted(request_id="r", prompt_tokens=1))
USAGE = Usage(prompt_tokens=1, completion_tokens=1)
REPORT = ProbeReport(heartbeat_age_s=0, running=0, waiting=0, format="chatglm3", max_context=8)
BEAT_S = 0.05
STATUSES = {
    RefusalCode.INVALID_REQUEST: "INVALID_ARG",
    RefusalCode.CONTEXT_LENGTH_EXCEEDED: "INVALID_ARG",
    RefusalCode.CANCELLED: "CANCELLED",
    RefusalCode.INTERNAL: "INTERNAL",
}
"""Those that are not UNAVAILABLE, by name: Triton adds them to its module after this one is read."""


class Call:
    """The responses to one request."""

    def __init__(self, request: Any) -> None:
        self.told = threading.Event()
        """To cancel."""
        self._sender = request.get_response_sender()

    def send(self, text: str, meta: Meta, *, final: bool = False) -> None:
        self._send(text, encode_meta(meta), final=final)

    def send_frame(self, frame: Frame) -> None:
        self._send("", encode_frame(frame), final=False)

    def refuse(self, code: RefusalCode, message: str) -> None:
        status = getattr(pb_utils.TritonError, STATUSES.get(code, "UNAVAILABLE"))
        error = pb_utils.TritonError(refusal_text(code, message), status)
        self._respond(pb_utils.InferenceResponse(error=error), final=True)

    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _send(self, text: str, document: bytes, *, final: bool) -> None:
        values = ((names.RESPONSE, text.encode()), (names.META, document))
        tensors = [pb_utils.Tensor(name, np.array([[value]], dtype=np.object_)) for name, value in values]
        self._respond(pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def _respond(self, response: Any, *, final: bool) -> None:
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


class Channel:
    """An open delta channel. It beats on a thread of its own until it is cancelled."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._number = 0
        self._send()
        threading.Thread(target=self._keep).start()

    def deliver(self, stream: int, text: str) -> int:
        """Send one delta of one token; return the number of its frame."""
        return self._send(streams=[stream], tokens=[1], texts=[text])

    def _send(self, **columns: Any) -> int:
        with self._lock:
            number = self._number
            self._number += 1
            self._call.send_frame(Frame(frame=number, **columns))
            return number

    def _keep(self) -> None:
        while not self._call.cancelled():
            time.sleep(BEAT_S)
            self._send()
        self._call.refuse(RefusalCode.CANCELLED, "as requested")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.folder = Path(args["model_repository"])
        self.channels: dict[str, Channel] = {}
        self.lasting: dict[str | None, Call] = {}
        while (self.folder / "hold").exists():
            time.sleep(0.05)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            prompt, document = (_string(request, name) for name in (names.PROMPT, names.SAMPLING))
            call = Call(request)
            match decode_request(document):
                case Probe():
                    call.send("", Meta(probe=REPORT), final=True)
                case OpenChannel(open_channel=channel_id):
                    self.channels[channel_id] = Channel(call)
                case Cancel(cancel=id_):
                    lasting = self.lasting.get(id_)
                    if lasting is not None:
                        lasting.told.set()
                    call.send("", Meta(cancelled=lasting is not None), final=True)
                case Tokenize():
                    call.send("", Meta(tokenized=Tokenized(ids=list(map(ord, prompt.decode())))), final=True)
                case Detokenize(detokenize=ids):
                    call.send("".join(map(chr, ids)), Meta(tokenized=Tokenized()), final=True)
                case Generation() as generation:
                    self._obey(*prompt.decode().partition(" ")[::2], generation, call)

    def _obey(self, word: str, argument: str, generation: Generation, call: Call) -> None:
        if word == "refuse":
            call.refuse(RefusalCode(argument), "why")
        elif word == "raise":
            raise ValueError("secret")
        elif word == "die":
            os._exit(1)
        elif word in {"hang", "beat"}:
            self.lasting[generation.request_id] = call
            threading.Thread(target=self._last, args=(call,), kwargs={"beat": word == "beat"}).start()
        else:
            self._answer(word, generation, call)

    def _answer(self, word: str, generation: Generation, call: Call) -> None:
        delivered = None
        if generation.channel is not None:
            channel = self.channels.get(generation.channel.id)
            if channel is None:
                call.refuse(RefusalCode.CHANNEL_LOST, "it is not open")
                return
            number = channel.deliver(generation.channel.stream, word)
            word, delivered = "", Delivered(deltas=1, frame=number)
        call.send("", ACCEPTED)
        tokens = 0 if delivered else 1
        last = Meta(tokens=tokens, finish_reason="stop", usage=USAGE, delivered=delivered)
        call.send(word, last, final=True)

    def _last(self, call: Call, *, beat: bool) -> None:
        call.send("", ACCEPTED)
        while not (call.told.wait(BEAT_S) or call.cancelled()):
            if beat:
                call.send("", Meta())
        (self.folder / f"cancelled-{uuid.uuid4()}").touch()
        call.refuse(RefusalCode.CANCELLED, "as requested")


def _string(request: Any, name: str) -> bytes:
    value: bytes = np.ravel(pb_utils.get_input_tensor_by_name(request, name).as_numpy())[0]
    return value
