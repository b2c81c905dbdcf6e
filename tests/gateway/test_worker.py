import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from gateway.configuration import restore_settings
from gateway.fleet import Place
from gateway.listeners import Listeners
from gateway.settings import Settings
from gateway.worker import decode_order, encode_order


class Socket:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


LISTENERS = Listeners(http=(Socket(5), Socket(6)), grpc="[::1]:7")  # type: ignore[arg-type]
PLACE = Place(number=1, count=3, folder=Path("/nowhere"), table=7)

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
seconds = st.floats(0, 1e300, exclude_min=True)
share = st.floats(0, 1)
many = st.integers(2**20, 2**63 - 1)
addresses = st.builds("{}{}:{}".format, st.sampled_from(["", "dns:///"]), st.just("a"), st.integers(1, 65535))
bounds = st.none() | many
keys = st.fixed_dictionaries(
    {
        "scopes": st.sets(st.sampled_from(["inference", "admin"])),
        "max_in_flight": bounds,
        "requests_per_minute": bounds,
        "tokens_per_minute": bounds,
    }
).flatmap(lambda rest: st.builds(lambda secret: rest | secret, st.builds(lambda key: {"key": key}, words)))
hashes = st.just({"sha256": "0aF9" * 16})
values: dict[str, st.SearchStrategy[Any]] = {
    "host": words,
    "port": st.integers(0, 1023),
    "kserve_http_port": st.none() | st.integers(1024, 9999),
    "kserve_grpc_port": st.none() | st.integers(10_000, 65535),
    "contract": st.lists(st.sampled_from(["batched", "m=unbatched", "a/b=chatglm2"])).map(tuple),
    "upstreams": st.lists(addresses, min_size=1).map(tuple),
    "repository_key": st.none() | st.just("a-header=with = signs, and commas"),
    "models": st.lists(words).map(tuple),
    "api_keys": st.lists(keys | hashes).map(
        lambda keys: tuple({"name": str(number)} | key for number, key in enumerate(keys))
    ),
    "allow_anonymous": st.just(value=True),
    "metrics_need_key": st.booleans(),
    "workers": st.integers(1, 64),
    "default_max_tokens": bounds,
    "max_choices": st.integers(1, 128),
    "strict": st.booleans(),
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "log_format": st.sampled_from(["json", "text"]),
    "log_sample": share,
    "log_prompts": st.booleans(),
    "trace_endpoint": st.none() | st.just("http://127.0.0.1:4318/v1/traces"),
    "trace_sample": share,
} | {
    name: seconds if name.endswith("_s") else many
    for name in Settings.model_fields
    if name.endswith("_s") or (name.startswith("max_") and name != "max_choices")
}


def test_every_setting_is_tried_below() -> None:
    assert set(values) == set(Settings.model_fields)


@given(st.fixed_dictionaries({}, optional=values))
def test_an_order_has_every_setting_secrets_too(chosen: dict[str, Any]) -> None:
    with variables():
        settings = restore_settings({"allow_anonymous": True} | chosen)
    line = encode_order(settings, LISTENERS, PLACE)
    assert line.count(b"\n") == 1
    # What has changed since must not part a replaced worker from the others.
    with variables(
        TRITONGATE_DEFAULT_MAX_TOKENS="8",
        TRITONGATE_MAX_WAITING="9",
        TRITONGATE_REPOSITORY_KEY="another=key",
        TRITONGATE_CONFIG="/nowhere/at.all",
    ):
        order = decode_order(line)
        restored = restore_settings(order.settings)
    assert restored.model_dump() == settings.model_dump()
    assert (order.http, order.grpc, order.place) == ([5, 6], "[::1]:7", PLACE)


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Have these of our environment variables and no others."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRITONGATE_")}
    with mock.patch.dict(os.environ, others | values, clear=True):
        yield
