import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from gateway.process.listeners import Listeners
from gateway.process.workers import decode_order, encode_order
from gateway.settings import Settings
from gateway.telemetry.metrics import Place


class Socket:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


LISTENERS = Listeners(http=(Socket(5), Socket(6)), grpc="[::1]:7")
PLACE = Place(number=1, count=3, table=7, applied={"models": 8}, asks=[9, 10, 11], asked=12)

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
        "tokens_per_day": st.none() | st.integers(1, 2**40 - 1),
        "models": st.lists(words, max_size=2).map(tuple),
    }
).flatmap(lambda rest: st.builds(lambda secret: rest | secret, st.builds(lambda key: {"key": key}, words)))
hashes = st.just({"sha256": ("0aF9" * 15, "1" * 60)})


def each_its_own(given: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return keys with names, and with secrets that are nobody else's."""
    named = []
    for number, key in enumerate(given):
        if "key" in key:
            secret: dict[str, Any] = {"key": f"{number}/{key['key']}/"}
        else:
            secret = {"sha256": [f"{number:04x}{digits}" for digits in key["sha256"]]}
        named.append({"name": str(number)} | key | secret)
    return tuple(named)


values: dict[str, st.SearchStrategy[Any]] = {
    "host": words,
    "port": st.integers(0, 1022),
    "kserve_http_port": st.none() | st.integers(1024, 9999),
    "kserve_grpc_port": st.none() | st.integers(10_000, 65535),
    "contract": st.lists(st.sampled_from(["batched", "m=unbatched", "a/b=chatglm2"])).map(tuple),
    "upstreams": st.lists(addresses, min_size=1).map(tuple),
    "upstream_ca": st.just(()),
    "upstream_cert": st.just(()),
    "upstream_key": st.just(()),
    "tls_cert": st.none(),
    "tls_key": st.none(),
    "metrics_address": st.none() | st.just("127.0.0.1:1023"),
    "plain_repository_key": st.just(value=True),
    "repository_key": st.none() | st.just("a-header=with = signs, and commas"),
    "models": st.lists(words)
    | st.dictionaries(
        words,
        st.fixed_dictionaries(
            {},
            optional={
                "entry": words,
                "system": words,
                "stop": st.lists(words, max_size=8),
                "defaults": st.just({"temperature": 0.5, "max_tokens": 9}),
                "limits": st.just({"n": 2}),
                "memory_gib": st.just(7.5),
                "contract": st.sampled_from(["batched", "chatglm2"]),
            },
        ),
    ),
    "models_file": st.none() | st.just("models.yaml"),
    "api_keys": st.lists(keys | hashes).map(each_its_own),
    "keys_file": st.none() | st.just("keys.yaml"),
    "allow_anonymous": st.just(value=True),
    "metrics_need_key": st.booleans(),
    "chat_page": st.booleans(),
    "warn_of_faults": st.booleans(),
    "vllm_metrics": st.booleans(),
    "workers": st.integers(1, 64),
    "default_max_tokens": bounds,
    "logits_bytes": st.integers(2**20, 2**30),
    "allowed_hosts": st.lists(st.sampled_from(["*", "a.example"]), max_size=2, unique=True).map(tuple),
    "cors_origins": st.lists(st.sampled_from(["*", "https://a.example"]), max_size=2, unique=True).map(tuple),
    "max_choices": st.integers(1, 128),
    "strict": st.booleans(),
    "resume": st.booleans(),
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "log_format": st.sampled_from(["json", "text", "plain"]),
    "log_sample": share,
    "log_prompts": st.booleans(),
    "tokenizers": st.lists(st.sampled_from(["/", "m=/"]), max_size=2, unique=True).map(tuple),
    "load_on_demand": st.sampled_from([True]),  # which others need
    "max_loaded_models": st.none() | st.integers(1, 9),
    "max_loaded_gib": st.none(),  # which needs memory_gib of all models
    "min_loaded_s": st.floats(0, 99),
    "unload_idle_s": st.none() | st.floats(0.1, 99),
    "pinned_models": st.lists(st.sampled_from(["a", "b"]), unique=True).map(tuple),
    "adapters": st.lists(st.just("tuned=m"), max_size=1).map(tuple),
    "trace_endpoint": st.none() | st.just("http://127.0.0.1:4318/v1/traces"),
    "trace_sample": share,
} | {
    name: seconds if name.endswith("_s") else many
    for name in Settings.model_fields
    if name.endswith("_s") or (name.startswith("max_") and name not in ("max_choices", "max_loaded_gib"))
}


def test_every_setting_is_tried_below() -> None:
    assert set(values) == set(Settings.model_fields)


@given(st.fixed_dictionaries({}, optional=values))
def test_an_order_has_every_setting_secrets_too(chosen: dict[str, Any]) -> None:
    defaults = {"allow_anonymous": True, "load_on_demand": True, "plain_repository_key": True}
    if chosen.get("models"):
        chosen.pop("adapters", None)  # which would have to be for one of them
    with variables():
        settings = Settings(**defaults | chosen)
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
        restored = Settings(**order.settings)
    assert restored.model_dump() == settings.model_dump()
    assert (order.http, order.grpc, order.place) == ([5, 6], "[::1]:7", PLACE)


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Have these of our environment variables and no others."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRITONGATE_")}
    with mock.patch.dict(os.environ, others | values, clear=True):
        yield
