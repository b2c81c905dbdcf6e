"""Entry `M` calls `M-stream` inside the server, by Triton's business logic scripting (BLS).

Every call blocks its thread. An inner request cannot be cancelled through BLS, only by a cancel request; and
when the other entry's process dies its answers stop without an error. Whoever calls must reckon with both.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from triton_models.errors import StreamRefusedError
from wire import names
from wire.history import Turn, encode_history
from wire.meta import Meta, decode_meta
from wire.refusal import RefusalCode, parse_refusal
from wire.sampling import Cancel, Generation, encode_sampling

log = logging.getLogger(__name__)

POLL_S = 0.25
LATEST = -1
"""As a version: the newest one that is loaded."""

_KNOWN_TEXTS = (
    ("Exceeds maximum queue size", RefusalCode.QUEUE_FULL, "its queue is full"),
    ("Request timeout expired", RefusalCode.DEADLINE_EXCEEDED, "the request waited too long in its queue"),
    ("is not healthy", RefusalCode.UNAVAILABLE, "its process has died"),
)
"""Texts of Triton's own, which come without a code."""


class StreamCaller(Protocol):
    """The stream entry, as far as its conversations go."""

    def wait_loaded(self) -> None:
        """At the start, wait until it is loaded; later, return at once.

        Raises:
            StreamRefusedError: it is not loaded, and the wait was long enough.
        """

    def generate(
        self, prompt: str, history: Sequence[Turn], generation: Generation
    ) -> Iterator[tuple[str, Meta]]:
        """Ask; yields each response's text and document, heartbeats too.

        Raises:
            StreamRefusedError: it refused, failed, or is not there.
        """

    def cancel(self, request_id: str) -> None:
        """End the generation of this id.

        Raises:
            StreamRefusedError: it is not there.
        """


class BlsCaller:
    """The real one. Usable from any number of threads.

    Args:
        entry: the stream entry's name.
        version: of that entry.
        pb_utils: Triton's module.
        startup_wait_s: how long the first calls wait for the entry: a server that loads its whole repository
            at once loads it beside this one, whose warm-up needs it.
    """

    def __init__(self, entry: str, version: int, pb_utils: Any, *, startup_wait_s: float) -> None:
        self._entry = entry
        self._version = version
        self._pb_utils = pb_utils
        self._wait_until = time.monotonic() + startup_wait_s
        self._seen = False

    def wait_loaded(self) -> None:
        """See `StreamCaller.wait_loaded`."""
        while not self._seen and not self._loaded():
            if time.monotonic() > self._wait_until:
                raise StreamRefusedError(RefusalCode.UNAVAILABLE, f"{self._entry} is not loaded")
            time.sleep(POLL_S)
        self._seen = True

    def generate(
        self, prompt: str, history: Sequence[Turn], generation: Generation
    ) -> Iterator[tuple[str, Meta]]:
        """See `StreamCaller.generate`."""
        return self._call(prompt.encode(), encode_history(list(history)), encode_sampling(generation))

    def cancel(self, request_id: str) -> None:
        """See `StreamCaller.cancel`."""
        for _ in self._call(b"", b"", encode_sampling(Cancel(request_id))):
            pass

    def _call(self, prompt: bytes, history: bytes, sampling: bytes) -> Iterator[tuple[str, Meta]]:
        values = {names.PROMPT: prompt, names.HISTORY: history, names.SAMPLING: sampling}
        request = self._pb_utils.InferenceRequest(
            model_name=self._entry,
            model_version=self._version,
            requested_output_names=[names.RESPONSE, names.META],
            inputs=[
                self._pb_utils.Tensor(name, np.array([[value]], dtype=np.object_))
                for name, value in values.items()
            ],
        )
        refusal: StreamRefusedError | None = None
        try:
            # Always to the end, behind which Triton lets go of the request.
            for response in request.exec(decoupled=True):
                if response.has_error():
                    refusal = refusal or self._refusal(response.error().message())
                elif (said := self._read(response)) is not None:
                    yield said
        except self._pb_utils.TritonModelException as error:
            refusal = self._refusal(str(error))
        if refusal is not None:
            raise refusal

    def _read(self, response: Any) -> tuple[str, Meta] | None:
        """Return what a response says; None for the empty last one."""
        tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
        if names.META not in tensors:
            return None
        text, meta = (tensors[name].as_numpy().ravel()[0] for name in (names.RESPONSE, names.META))
        return text.decode(), decode_meta(meta)

    def _refusal(self, text: str) -> StreamRefusedError:
        if (found := parse_refusal(text)) is not None:
            return StreamRefusedError(*found)
        log.warning("%s: %s", self._entry, text)
        if not self._loaded():
            return StreamRefusedError(RefusalCode.UNAVAILABLE, f"{self._entry} is not loaded")
        for words, code, why in _KNOWN_TEXTS:
            if words in text:
                return StreamRefusedError(code, f"{self._entry}: {why}")
        return StreamRefusedError(RefusalCode.INTERNAL, f"{self._entry} failed to answer")

    def _loaded(self) -> bool:
        version = "" if self._version == LATEST else str(self._version)
        return bool(self._pb_utils.is_model_ready(self._entry, version))
