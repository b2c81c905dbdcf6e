"""Stand-ins for what only Triton's stub has: responses' way out, and custom metrics."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from wire.channel import Frame
from wire.meta import Meta, decode_meta
from wire.refusal import RefusalCode

TIMEOUT_S = 30.0


@dataclass
class FakeResponder:
    """Keeps what it was given, and counts heartbeats; `on_send` runs before each other response."""

    on_send: Callable[[], object] = lambda: None
    gone: bool = False
    trace_context: str | None = None
    channel: "FakeResponder | None" = None
    """Where the deltas go, from stream 0 on, if the answer is streamed."""
    responses: list[tuple[str, Meta]] = field(default_factory=list)
    heartbeats: int = 0
    frames: list[Frame] = field(default_factory=list)
    refusal: tuple[RefusalCode, str] | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def send(self, text: str, meta: Meta, *, final: bool) -> None:
        assert not self.ended.is_set(), "a response after the final one"
        if (text, meta, final) == ("", Meta(), False):
            self.heartbeats += 1
            return
        self.on_send()
        self.responses.append((text, meta))
        if final:
            self.ended.set()

    def send_frame(self, frame: Frame) -> None:
        assert not self.ended.is_set(), "a frame after the end"
        self.on_send()
        self.frames.append(frame)

    def refuse(self, code: RefusalCode, message: str) -> None:
        assert not self.ended.is_set(), "a refusal after the final response"
        self.refusal = (code, message)
        self.ended.set()

    def cancelled(self) -> bool:
        assert not self.ended.is_set(), "asking about an ended request crashes the server"
        return self.gone

    def wait(self) -> "FakeResponder":
        assert self.ended.wait(TIMEOUT_S), "no final response"
        return self

    @property
    def refused(self) -> tuple[RefusalCode, str]:
        assert self.refusal is not None, "it was not refused"
        return self.refusal

    @property
    def text(self) -> str:
        deltas = self.channel.deltas(0) if self.channel else []
        return "".join([delta[0] for delta in deltas] + [response[0] for response in self.responses])

    @property
    def metas(self) -> list[Meta]:
        return [meta for _, meta in self.responses]

    def deltas(self, stream: int) -> list[tuple[str, int, Meta | None]]:
        """Return what the frames hold for one generation."""
        found = []
        for frame in self.frames:
            for place, number in enumerate(frame.streams):
                if number == stream:
                    meta = frame.metas.get(place)
                    details = None if meta is None else decode_meta(bytes(meta))
                    found.append((frame.texts[place], frame.tokens[place], details))
        return found

    @property
    def prompt_token_ids(self) -> list[int]:
        accepted = self.metas[0].accepted
        assert accepted is not None
        assert accepted.prompt_token_ids is not None, "they were not asked for"
        return accepted.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        return [token_id for meta in self.details for token_id in meta.token_ids or []]

    @property
    def details(self) -> list[Meta]:
        """The documents of its first choice, those of its deltas first."""
        deltas = self.channel.deltas(0) if self.channel else []
        return [*(meta for *_, meta in deltas if meta), *self.metas]


def wait_until(holds: Callable[..., bool]) -> None:  # called with nothing: a loop's value is its default
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)


class FakeMetric:
    def __init__(self, family: "FakeFamily", labels: dict[str, str]) -> None:
        self._family = family
        self.labels = labels
        self.value = 0.0
        self.observations: list[float] = []

    def increment(self, amount: float) -> None:
        self._family.note_thread()
        self.value += amount

    def set(self, value: float) -> None:
        self._family.note_thread()
        self.value = value

    def observe(self, value: float) -> None:
        self._family.note_thread()
        self.observations.append(value)


class FakeFamily:
    """Like `pb_utils.MetricFamily`; remembers which threads touched any metric."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    made: ClassVar[dict[str, list[FakeMetric]]]
    threads: ClassVar[set[int]]

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert description
        self.note_thread()
        self.kind = kind
        self.made.setdefault(name, [])
        self._metrics = self.made[name]

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:  # noqa: N802
        self.note_thread()
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        self._metrics.append(FakeMetric(self, labels))
        return self._metrics[-1]

    def note_thread(self) -> None:
        self.threads.add(threading.get_ident())


class FakePbUtils:
    """As much of `triton_python_backend_utils` as the metrics use."""

    def __init__(self) -> None:
        class Family(FakeFamily):
            made: ClassVar[dict[str, list[FakeMetric]]] = {}
            threads: ClassVar[set[int]] = set()

        self.MetricFamily = Family

    def metric(self, name: str, **labels: str) -> Any:
        (found,) = [
            metric
            for metric in self.MetricFamily.made[f"tritongate_engine_{name}"]
            if labels.items() <= metric.labels.items()
        ]
        return found


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


PB_UTILS = SimpleNamespace(
    TritonError=TritonError,
    Tensor=lambda name, values: (name, values),
    InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
        output_tensors=output_tensors, error=error
    ),
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)
"""As much of `triton_python_backend_utils` as responses are made with."""
