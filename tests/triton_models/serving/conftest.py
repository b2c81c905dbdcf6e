"""A running service over the golden ChatGLM3 checkpoint."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_models.serving.fakes import FakePbUtils, FakeResponder, wait_until
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.settings import EngineSettings
from triton_models.options import EntryParameters
from triton_models.serving.chat_text import ChatText, load_text
from triton_models.serving.intake import Arrival, Inputs
from triton_models.serving.report import PREFIX, EngineMetrics
from triton_models.serving.service import Service
from triton_models.serving.spans import ModelSpans
from wire.meta import ProbeReport
from wire.request import ChannelStream, Generation, OpenChannel, encode_request

GOLDEN = Path(__file__).parents[2] / "golden" / "chatglm3"

HEARTBEAT_S = 0.2


@pytest.fixture(scope="session")
def model() -> Decoder:
    found = load_model(GOLDEN, torch.float32, torch.device("cpu"))
    assert isinstance(found, Decoder)
    return found


def parameters(checkpoint: Path = GOLDEN, device: str = "cpu", **options: Any) -> EntryParameters:
    return EntryParameters(model="glm", checkpoint=checkpoint, device=device, version=1, options=options)


@pytest.fixture(scope="session")
def text() -> ChatText:
    return load_text(parameters())


@pytest.fixture
def pb_utils() -> FakePbUtils:
    return FakePbUtils()


class Slow:
    """A model whose every step takes a while, so that what is asked of a busy engine finds it busy."""

    STEP_S = 0.01

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        time.sleep(self.STEP_S)
        return self._model.forward(*arguments)


class Served:
    """A service and the shortest way to ask it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._channels = itertools.count()

    def ask(
        self,
        prompt: str = "你好",
        responder: FakeResponder | None = None,
        *,
        streamed: bool = False,
        **sampling: Any,
    ) -> FakeResponder:
        """Ask for a generation; if it is `streamed`, over a channel of its own."""
        responder = responder or FakeResponder()
        if streamed:
            number = next(self._channels)
            responder.channel = self.open_channel(f"channel {number}")
            sampling["channel"] = ChannelStream(id=f"channel {number}", stream=0)
        return self.send(encode_request(Generation(**sampling)), prompt, responder)

    def open_channel(self, channel_id: str) -> FakeResponder:
        channel = self.send(encode_request(OpenChannel(channel_id)))
        wait_until(lambda: bool(channel.frames) or channel.ended.is_set())
        return channel

    def probe(self) -> ProbeReport:
        report = self.send(b'{"probe":true}').wait().metas[0].probe
        assert report is not None
        return report

    def busy(self) -> int:
        """Return how many sequences run or wait."""
        report = self.probe()
        return report.running + report.waiting

    def send(
        self, sampling: bytes, prompt: str = "", responder: FakeResponder | None = None, history: bytes = b""
    ) -> FakeResponder:
        responder = responder or FakeResponder()
        self.service.submit([Arrival(responder, Inputs(prompt.encode(), history, sampling))])
        return responder


@pytest.fixture
def serve(model: Decoder, text: ChatText, pb_utils: FakePbUtils) -> Iterator[Callable[..., Served]]:
    """Return a function that starts a service with the given engine settings."""
    services = []

    def start(*, slow: bool = False, spans: ModelSpans | None = None, **settings: Any) -> Served:
        engine = Engine(Slow(model) if slow else model, EngineSettings(**settings))
        metrics = EngineMetrics("glm", 1, pb_utils)
        services.append(
            Service(
                engine,
                text,
                metrics,
                vocabulary=model.vocab_size,
                heartbeat_s=HEARTBEAT_S,
                spans=spans,
            )
        )
        services[-1].start()
        # The writing thread makes its metrics, of which this is the last one, whenever it comes to run.
        wait_until(lambda: bool(pb_utils.MetricFamily.made.get(PREFIX + "time_to_first_token_seconds")))
        return Served(services[-1])

    yield start
    for service in services:
        service.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
