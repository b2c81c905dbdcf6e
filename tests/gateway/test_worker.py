from pathlib import Path

import pytest

from gateway.configuration import load_settings
from gateway.fleet import Place
from gateway.worker import decode_order, encode_order

PLACE = Place(number=1, count=3, folder=Path("/nowhere"))


def test_an_order_has_every_setting_secrets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_MAX_WAITING", "7")
    settings = load_settings(
        {
            "models": ("a", "b"),
            "upstreams": ("one:8001", "dns:///two:8001"),
            "api_keys": [
                {"name": "me", "key": "secret", "scopes": ["inference", "admin"]},
                {"name": "you", "sha256": "0" * 64},
            ],
            "repository_key": "header=a value=with signs",
            "workers": 3,
            "default_max_tokens": 12,
            "log_prompts": True,
        }
    )
    line = encode_order(settings, 5, PLACE)
    assert line.count(b"\n") == 1
    monkeypatch.setenv("TRITONGATE_MAX_WAITING", "8")
    monkeypatch.setenv("TRITONGATE_HOST", "0.0.0.0")  # noqa: S104 - not to be seen
    order = decode_order(line)
    assert load_settings(order.settings).model_dump() == settings.model_dump()
    assert (order.listener, order.place) == (5, PLACE)
