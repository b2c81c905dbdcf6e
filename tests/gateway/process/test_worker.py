import pickle
from pathlib import Path
from typing import Any

import pytest

from gateway.process.listeners import Listeners
from gateway.process.workers import encode_order
from gateway.settings import Settings
from gateway.telemetry.metrics import Place


class Socket:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


LISTENERS = Listeners(http=(Socket(5), Socket(6)), grpc="[::1]:7")
PLACE = Place(number=1, count=3, folder=Path("/nowhere"), table=7)
CHOSEN: dict[str, Any] = {
    "upstreams": "a:1,dns:///b:2",
    "repository_key": "a-header=with = signs, and commas",
    "plain_repository_key": True,
    "models": {"m": {"entry": "e", "stop": ["a"], "defaults": {"temperature": 0.5}, "contract": "batched"}},
    "contract": "batched,m=unbatched",
    "adapters": "tuned=m",
    "tokenizers": "m=/",
    "api_keys": [
        {"name": "a", "key": "s3cret", "scopes": ["admin"], "tokens_per_day": 7},
        {"name": "b", "sha256": "0aF9" * 16},
    ],
    "allowed_hosts": ["*"],
    "workers": "auto",
    "load_on_demand": True,
    "pinned_models": ["m"],
    "unload_idle_s": 9.5,
    "trace_endpoint": "http://127.0.0.1:4318/v1/traces",
    "metrics_address": "127.0.0.1:1023",
}


@pytest.mark.parametrize("chosen", [{}, CHOSEN, CHOSEN | {"models": "a,b", "tokenizers": ""}])
def test_an_order_has_every_setting_secrets_too(
    chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**chosen)
    order = pickle.loads(encode_order(settings, LISTENERS, PLACE))  # noqa: S301 - our own
    # What has changed since must not part a replaced worker from the others.
    monkeypatch.setenv("TRITONGATE_MAX_WAITING", "9")
    monkeypatch.setenv("TRITONGATE_CONFIG", "/nowhere/at.all")
    assert Settings(**order["settings"]) == settings
    assert (order["http"], order["grpc"], order["place"], order["succeeds"]) == (
        [5, 6],
        "[::1]:7",
        PLACE,
        False,
    )
