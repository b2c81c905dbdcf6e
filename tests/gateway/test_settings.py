import os
import sys
from pathlib import Path

import pytest

from gateway import setting_types
from gateway.configuration import ConfigurationError, load_settings, settings_table
from gateway.setting_types import ApiKey, is_loopback, revealed
from gateway.settings import Settings

pytestmark = pytest.mark.usefixtures("clean_environment")


def test_defaults() -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.upstreams == ("127.0.0.1:8001",)
    assert settings.drain_s == 30


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_API_KEYS", '[{"name": "a", "key": "s3cret", "scopes": ["admin"]}]')
    settings = load_settings()
    assert settings.api_keys[0].name == "a"
    assert "s3cret" not in repr(settings)


def test_names_of_tritons_are_spelled_as_grpc_spells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_UPSTREAMS", "dns:///triton:1,dns:triton:2,dns:3,10.0.0.1:4,dns:///[::1]:5")
    assert load_settings().upstreams == (
        "dns:///triton:1",
        "dns:///triton:2",
        "dns:3",  # a host of that name
        "10.0.0.1:4",
        "dns:///[::1]:5",
    )


def test_a_repository_key_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_REPOSITORY_KEY", "admin-key=s3cret=x")
    settings = load_settings()
    assert revealed(settings.repository_key) == "admin-key=s3cret=x"
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in str(settings.model_dump())
    assert revealed(load_settings({"repository_key": None}).repository_key) is None


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")),  # noqa: S104
    ],
)
def test_outside_needs_keys_or_a_decision(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    if not loopback:
        load_settings({"host": host, "allow_anonymous": True})
        load_settings({"host": host, "api_keys": [ApiKey(name="a", key="k")]})


def test_every_setting_has_a_default_and_help() -> None:
    rows = list(settings_table())
    assert [row.name for row in rows] == list(Settings.model_fields)
    assert all(row.help for row in rows)
    assert not any(field.is_required() for field in Settings.model_fields.values())
    assert [row.name for row in rows if row.flag is None] == ["repository_key", "api_keys"]


@pytest.mark.parametrize("value", ["collector:4318", "ftp://collector/v1/traces", "http://", "/v1/traces"])
def test_an_endpoint_is_a_url(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"trace_endpoint: .*is not a URL"):
        load_settings({"trace_endpoint": value})


def test_traces_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'tritongate\[tracing\]'"):
        load_settings({"trace_endpoint": "http://collector:4318/v1/traces"})


def test_a_port_serves_one_thing() -> None:
    with pytest.raises(ConfigurationError, match="must differ"):
        load_settings({"port": 8000, "kserve_http_port": 8000})
    with pytest.raises(ConfigurationError, match="must differ"):
        load_settings({"kserve_http_port": 8001, "kserve_grpc_port": 8001})
    free = load_settings({"port": 0, "kserve_http_port": 0, "kserve_grpc_port": 0})
    assert free.http_ports() == [0, 0]
    assert load_settings({"port": 1}).http_ports() == [1]


@pytest.mark.parametrize("value", ["v2", "=batched", "m=", "m=v2", "batched,m=x"])
def test_contracts_are_known_ones(value: str) -> None:
    with pytest.raises(ConfigurationError, match="contract"):
        load_settings({"contract": value})
    assert load_settings({"contract": "batched, a/b=chatglm2"}).contract == ("batched", "a/b=chatglm2")


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3), (12, 4), (16, 4), (128, 4)]
)
def test_there_is_a_worker_for_every_three_cores(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(setting_types, "_QUOTA", tmp_path / "absent")
    assert load_settings().workers == load_settings({"workers": "auto"}).workers == workers
    assert load_settings({"workers": "7"}).workers == 7


@pytest.mark.parametrize(
    ("quota", "workers"), [("max 100000", 4), ("600000 100000", 2), ("50000 100000", 1), ("?", 4)]
)
def test_cores_that_a_container_may_not_use_have_no_workers(
    quota: str, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setattr(setting_types, "_QUOTA", path)
    assert load_settings().workers == workers


@pytest.mark.parametrize("value", ["0", "65", "automatic", "2.5"])
def test_a_number_of_workers_is_one(value: str) -> None:
    with pytest.raises(ConfigurationError, match="workers"):
        load_settings({"workers": value})
