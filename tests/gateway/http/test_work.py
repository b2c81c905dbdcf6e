"""What a token costs the gateway, counted and not timed."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase

import gateway
from bench.gateway_delivery import measure
from gateway.core.upstream import ModelCard
from gateway.http.record import Gateway
from gateway.telemetry.bulk import BulkCounter, BulkHistogram
from tests.gateway.fake_upstream import FakeUpstream, Script, say
from tests.gateway.serving import CHAT, MESSAGES, in_process

STREAMS = 8
CALLS_PER_TOKEN = 26.2
"""Of functions of ours, each resumption of a coroutine or generator among them. A frame has all STREAMS."""

ALL = Gateway.models

_OURS = str(Path(gateway.__file__).parent)


def calls(tokens: int) -> int:
    """Return how often functions of the gateway run for STREAMS of `tokens` each, ends included."""
    count = 0

    def seen(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_OURS)

    sys.setprofile(seen)
    try:
        list(measure((STREAMS,), new_tokens=tokens))
    finally:
        sys.setprofile(None)
    return count


def test_a_token_passes_few_functions() -> None:
    few, many = calls(50), calls(550)
    assert many > few
    assert (many - few) / (500 * STREAMS) <= CALLS_PER_TOKEN


def saying(tokens: int) -> Script:
    return lambda _: say(*"x" * tokens)


async def test_labels_are_looked_up_once_a_request_and_not_for_each_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups = 0

    def counted(kind: Any) -> None:
        original = kind.labels

        def labels(self: Any, *values: Any, **names: Any) -> Any:
            nonlocal lookups
            lookups += 1
            return original(self, *values, **names)

        monkeypatch.setattr(kind, "labels", labels)

    counted(MetricWrapperBase)
    counted(BulkHistogram)
    counted(BulkCounter)
    costs = []
    for tokens in (2, 60):
        async with in_process(FakeUpstream(saying(tokens))) as served:
            lookups = 0
            answer = await served.chat(stream=True)
            assert answer.text.count("data: ") >= tokens
            costs.append(lookups)
            assert served.metric("generated_tokens_total", model="glm") == tokens
    assert costs[0] > 0
    assert costs[0] == costs[1]


async def test_a_request_looks_at_its_own_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def models(self: Gateway, key: str | None) -> list[ModelCard]:
        nonlocal looks
        looks += 1
        return ALL(self, key)

    monkeypatch.setattr(Gateway, "models", models)
    async with in_process(FakeUpstream(models=("glm",))) as served:
        assert (await served.chat()).status_code == 200
        assert looks == 0
        assert (await served.http.post(CHAT, json={"messages": MESSAGES})).json()["model"] == "glm"
        assert looks == 1
