"""Calls from entry `M` to `M-stream` inside the server, by Triton's business logic scripting (BLS).

Every call blocks its thread. An inner request cannot be cancelled through BLS, only by a cancel request to
`M-stream`; and if that entry's process dies, its answers stop without an error. Callers must handle both.

No call may get more than two responses. The first comes with the start; if two more came while its thread
waits, this process could stand still for ever, between the interpreter lock and two locks of Triton's code
(see ARCHITECTURE.md). So generations are `quiet`.

What BLS returns must outlive its use. One of Triton's threads in this process, which does not hold the
interpreter lock, keeps references to an iterator and its responses for a moment after their last use here. If
those were the last references, that thread would destroy Python objects without the lock (tritonserver 2.51:
256 calls at once crashed within seconds).
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np

from triton_models.errors import StreamRefusedError
from triton_models.serving.nudges import Nudges
from triton_models.serving.starts import Starts, StartsLostError
from wire import names
from wire.history import Turn, encode_history
from wire.meta import Meta, decode_meta
from wire.refusal import RefusalCode, parse_refusal
from wire.sampling import Cancel, Generation, Probe, encode_sampling

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
"""How long a call may wait to start behind other calls that have no response yet."""

KEEP_S = 5.0
"""How long the results of BLS are kept after their use; Triton needs them only for a moment."""

LATEST = -1
"""As a version: the newest one that is loaded."""

_KNOWN_TEXTS = (
    ("Exceeds maximum queue size", RefusalCode.QUEUE_FULL, "its queue is full"),
    ("Request timeout expired", RefusalCode.DEADLINE_EXCEEDED, "the request waited too long in its queue"),
    ("is not healthy", RefusalCode.UNAVAILABLE, "its process has died"),
)
"""Triton's own error texts, which have no code."""


class StreamCaller(Protocol):
    """The stream entry, as far as entry `M` uses it."""

    def generate(
        self, prompt: str, history: Sequence[Turn], generation: Generation
    ) -> Iterator[tuple[str, Meta]]:
        """Run a generation; yield the text and document of each of its two responses.

        Args:
            prompt: its prompt.
            history: the turns before it.
            generation: a quiet one.

        Raises:
            StreamRefusedError: the entry refused, failed, or is not loaded.
        """

    def give_up(self, silent_s: float) -> None:
        """Give up calls without any response for `silent_s` seconds; there will not be one."""

    def cancel(self, request_id: str) -> None:
        """End the generation with this id.

        Raises:
            StreamRefusedError: the entry is not loaded, or failed.
        """


class BlsCaller:
    """The `StreamCaller` that calls through BLS. Usable from any number of threads.

    Args:
        entry: the stream entry's name.
        version: that entry's version, or `LATEST`.
        pb_utils: Triton's module.
    """

    def __init__(self, entry: str, version: int, pb_utils: Any) -> None:
        self._entry = entry
        self._version = version
        self._pb_utils = pb_utils
        self._kept = _Kept()
        self._starts = Starts()
        self._nudges = Nudges(self._starts, self._nudge)

    def give_up(self, silent_s: float) -> None:
        """See `StreamCaller.give_up`."""
        self._nudges.replace_lost(silent_s)
        try:
            self._starts.replace_lost(silent_s)
        except StartsLostError:
            log.critical(
                "%s died too often under this process's calls; it ends, to be started anew", self._entry
            )
            os._exit(1)

    def generate(
        self, prompt: str, history: Sequence[Turn], generation: Generation
    ) -> Iterator[tuple[str, Meta]]:
        """See `StreamCaller.generate`."""
        said = encode_history(list(history))
        return self._call(self._start(), encode_sampling(generation), prompt.encode(), said)

    def cancel(self, request_id: str) -> None:
        """See `StreamCaller.cancel`."""
        for _ in self._call(self._start(), encode_sampling(Cancel(request_id))):
            pass

    def _nudge(self) -> None:
        with suppress(StreamRefusedError):  # which is an answer, too
            for _ in self._call(nullcontext(), encode_sampling(Probe(probe=True))):
                pass

    @contextmanager
    def _start(self) -> Iterator[None]:
        with self._starts.place(START_TIMEOUT_S):
            self._nudges.begin()
            yield

    def _call(
        self, start: AbstractContextManager[None], sampling: bytes, prompt: bytes = b"", history: bytes = b""
    ) -> Iterator[tuple[str, Meta]]:
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
        used: list[Any] = []
        try:
            with start:
                used.append(request.exec(decoupled=True))  # returns with the first response
            # Always read to the end: only then does Triton release the request.
            for response in used[0]:
                used.append(response)
                if response.has_error():
                    refusal = refusal or self._refusal(response.error().message())
                elif (said := self._read(response)) is not None:
                    yield said
        except self._pb_utils.TritonModelException as error:
            refusal = self._refusal(str(error))
        except TimeoutError:
            refusal = StreamRefusedError(RefusalCode.UNAVAILABLE, f"{self._entry} does not answer")
        finally:
            self._kept.add(used)
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


class _Kept:
    """Keeps objects alive for a while after their use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: deque[tuple[float, Any]] = deque()

    def add(self, thing: Any) -> None:
        """Keep `thing` for at least KEEP_S seconds, and drop what was kept that long."""
        now = time.monotonic()
        with self._lock:
            self._things.append((now, thing))
            while self._things[0][0] < now - KEEP_S:
                self._things.popleft()
