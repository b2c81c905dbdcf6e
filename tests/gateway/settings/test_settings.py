import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import (
    ConfigurationError,
    Settings,
    load_settings,
    settings_table,
    unknown_variables,
    values,
)
from gateway.settings.values import ApiKey, is_loopback, revealed

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def test_flags_over_environment_over_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    config.write_text("port: 1\nmax_waiting: 1\nmax_in_flight: 1\n")
    monkeypatch.setenv("TRITONGATE_PORT", "2")
    monkeypatch.setenv("TRITONGATE_MAX_WAITING", "2")
    monkeypatch.setenv("TRITONGATE_CONFIG", str(config))
    settings = load_settings({"port": "3"})
    assert (settings.port, settings.max_waiting, settings.max_in_flight) == (3, 2, 1)
    assert settings.max_body_bytes == 4 * 2**20


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1 , b:2,", '["a:1", "b:2"]'])
def test_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRITONGATE_UPSTREAMS", text)
    assert load_settings().upstreams == ("a:1", "b:2")


@pytest.mark.parametrize("text", ["[::1]:1,b:2", " [fe80::1%eth0]:1", '["[::1]:1", "b:2"]', "b:2,[::1]:1"])
def test_addresses_of_ipv6_are_a_list_too(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRITONGATE_UPSTREAMS", text)
    from_environment = load_settings().upstreams
    assert load_settings({"upstreams": text}).upstreams == from_environment
    assert {each.rpartition(":")[0] for each in from_environment} <= {"[::1]", "[fe80::1%eth0]", "b"}
    with pytest.raises(ConfigurationError, match="not a list"):
        load_settings({"upstreams": "[a:1, b:2]"})


def test_an_empty_variable_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_DEFAULT_MAX_TOKENS", "")
    assert load_settings().default_max_tokens is None


@pytest.mark.parametrize(
    ("flags", "environment", "file", "expected"),
    [
        ({"port": "x"}, {}, "", ["port", "flag --port"]),
        ({"port": "-1"}, {}, "", ["port", "flag --port"]),
        ({}, {"PORT": "x"}, "", ["port", "environment variable TRITONGATE_PORT"]),
        ({}, {"UPSTREAMS": "nowhere"}, "", ["upstreams.0", "TRITONGATE_UPSTREAMS"]),
        ({}, {"UPSTREAMS": "dns:///nowhere"}, "", ["upstreams.0", "TRITONGATE_UPSTREAMS"]),
        ({}, {"UPSTREAMS": "http://triton:8001"}, "", ["upstreams.0", "not host:port: leave out http://"]),
        ({}, {"UPSTREAMS": "https://triton:8000/v2"}, "", ["upstreams.0", "leave out http:// and any path"]),
        ({}, {"UPSTREAMS": "dns:///::1:8001"}, "", ["upstreams.0", "is not host:port"]),
        ({}, {"UPSTREAMS": "::1:8001"}, "", ["upstreams.0", "'::1:8001' is not host:port"]),
        ({}, {"UPSTREAMS": "dns://9.9.9.9/triton:1"}, "", ["upstreams.0", "names a server to ask"]),
        ({}, {"MODELS": '["a"'}, "", ["models", "TRITONGATE_MODELS"]),
        (
            {},
            {"REPOSITORY_KEY": "s3cret"},
            "",
            ["repository_key: not KEY=VALUE", "TRITONGATE_REPOSITORY_KEY"],
        ),
        ({}, {}, "repository_key: Admin=s3cret", ["repository_key: not KEY=VALUE", "lower case"]),
        ({}, {}, "repository_key: key-bin=s3cret", ["repository_key: not KEY=VALUE"]),
        ({}, {}, "repository_key: key=s3cret\u4f60", ["repository_key: not KEY=VALUE"]),
        ({}, {"API_KEYS": "s3cret"}, "", ["api_keys", "TRITONGATE_API_KEYS"]),
        ({}, {"IDLE_TIMEOUT_S": "nan"}, "", ["idle_timeout_s"]),
        ({}, {}, "max_in_flight: 0", ["max_in_flight", "gateway.yaml"]),
        ({}, {}, "prot: 1", ["prot: unknown setting; did you mean port?", "gateway.yaml"]),
        ({}, {}, "max-in-flight: 1", ["max-in-flight: unknown setting; did you mean max_in_flight?"]),
        ({}, {}, "zzz: 1", ["zzz: unknown setting (from"]),
        ({}, {}, "port: [1]", ["port: a whole number is needed (from"]),
        ({}, {}, "port: true", ["port: a number is needed", "gateway.yaml"]),
        ({}, {}, "max_loaded_models: on", ["max_loaded_models: a number is needed"]),
        ({}, {}, "workers: yes", ["workers: a number is needed"]),
        ({}, {}, "models: {a: {memory_gib: yes}}", ["models.a.memory_gib: a number is needed"]),
        ({}, {}, "models: {a: {limits: {n: yes}}}", ["models.a.limits.n: a number is needed"]),
        (
            {},
            {},
            "api_keys: [{name: a, key: k, requests_per_minute: off}, {name: b, key: l, max_in_flight: on}]",
            ["api_keys.0.requests_per_minute: a number", "api_keys.1.max_in_flight: a number is needed"],
        ),
        ({}, {"PORT": "80a"}, "", ["port: a whole number is needed (from"]),
        ({}, {}, "request_timeout_s: 10m", ["request_timeout_s: a number is needed (from"]),
        ({}, {}, "resume: maybe", ["resume: true or false is needed (from"]),
        ({}, {}, "workers: four", ["workers: a whole number or auto is needed (from"]),
        ({}, {}, "models: 5", ["models: a mapping is needed (from"]),
        ({}, {}, "models: [{entry: a}]", ["models: a mapping is needed (from"]),
        ({}, {"MODELS": '[["a"]]'}, "", ["models: a mapping is needed (from", "TRITONGATE_MODELS"]),
        ({}, {}, "api_keys: s3cret", ["api_keys: a list is needed (from"]),
        ({}, {}, "api_keys: [{name: a, key: 123}]", ["api_keys.0.key: text is needed", "quotes"]),
        ({}, {}, "api_keys: [{name: a, key: b, scopes: admin}]", ["api_keys.0.scopes: a list is needed"]),
        ({}, {}, "upstreams: []", ["upstreams: at least 1 is needed (from"]),
        ({}, {"CORS_ORIGINS": "example.org"}, "", ["cors_origins.0: 'example.org' is not https://host"]),
        ({}, {"CORS_ORIGINS": "https://*.a.example"}, "", ["cors_origins.0", "of one host, nor * for all"]),
        ({"cors_origins": "http://localhost:*"}, {}, "", ["cors_origins.0", "of one host, nor * for all"]),
        ({}, {}, "cors_origins: https://a.example/page", ["cors_origins.0", "is not https://host[:port]"]),
        ({}, {}, "api_keys: [{name: a, kee: s3cret}]", ["api_keys.0.kee: unknown key; did you mean key?"]),
        ({}, {}, "api_keys: [{name: a, key: b, zzz: 1}]", ["api_keys.0.zzz: unknown key (from"]),
        ({}, {}, "api_keys: [{name: a}]", ["api_keys.0", "exactly one of key and sha256"]),
        ({}, {}, "api_keys: [{name: a, key: s3cret}, {name: a, key: b}]", ["keys have the name 'a' (from"]),
        ({}, {}, "api_keys: [{name: a, key: s3cret}, {name: b, key: s3cret}]", ["'a' and 'b' are one key"]),
        ({}, {}, "api_keys: [{name: a, key: ' s3cret'}]", ["api_keys.0", "with white space"]),
        ({}, {}, "api_keys:\n- name: a\n  key: |\n    s3cret\n", ["api_keys.0", "with white space"]),
        ({}, {}, "api_keys: [{name: a, sha256: s3cret}]", ["sha256.0: 64 hexadecimal digits are needed"]),
        ({}, {}, "- 1", ["gateway.yaml", "mapping"]),
        ({}, {}, "port: 1\nkey: s3cret: [", ["gateway.yaml", "line 2"]),
        ({"host": "0.0.0.0"}, {}, "", ["host", "--keys-file FILE", "--allow-anonymous"]),  # noqa: S104
    ],
)
def test_errors_name_field_and_source(  # noqa: PLR0917 - a table
    monkeypatch: pytest.MonkeyPatch,
    config: Path,
    flags: dict[str, Any],
    environment: dict[str, str],
    file: str,
    expected: list[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv("TRITONGATE_" + name, value)
    config.write_text(file)
    with pytest.raises(ConfigurationError) as error:
        load_settings(flags, config)
    message = str(error.value)
    assert not [text for text in expected if text not in message], message
    assert "s3cret" not in message


@pytest.mark.parametrize("given", ["triton", "triton,b:1", '["triton"]'])
def test_what_is_wrong_in_a_list_is_all_that_is_said_of_it(given: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_settings({"upstreams": given, "port": -1})
    fields = [line.partition(": ")[0] for line in str(error.value).splitlines()]
    assert sorted(fields) == ["port", "upstreams.0"]


def test_origins_become_what_browsers_send() -> None:
    given = "https://Page.example/,http://localhost:3000,null,chrome-extension://abc,*"
    assert load_settings({"cors_origins": given}).cors_origins == (
        "https://page.example",
        "http://localhost:3000",
        "null",
        "chrome-extension://abc",
        "*",
    )


def test_hosts_are_names_alone() -> None:
    given = "Chat.example.,*.example.org,*,10.0.0.7,xn--fiq228c.example,a_b"
    assert load_settings({"allowed_hosts": given}).allowed_hosts == (
        "chat.example",
        "*.example.org",
        "*",
        "10.0.0.7",
        "xn--fiq228c.example",
        "a_b",
    )
    for wrong in ("chat.example:8080", "https://chat.example", ".example.org", "chat.example/", "a*.example"):
        with pytest.raises(ConfigurationError, match="without scheme and port"):
            load_settings({"allowed_hosts": wrong})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load_settings(config=tmp_path / "absent.yaml")


def test_a_misspelt_variable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_MAX_INFLIGHT", "3")
    monkeypatch.setenv("TRITONGATE_MAX_IN_FLIGHT", "3")
    monkeypatch.setenv("TRITONGATE_KEY", "a client's")
    assert unknown_variables() == ["TRITONGATE_MAX_INFLIGHT"]


def test_what_kubernetes_tells_of_a_service_of_our_name_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "TRITONGATE_PORT": "tcp://10.96.0.1:8080",
        "TRITONGATE_PORT_8080_TCP": "tcp://10.96.0.1:8080",
        "TRITONGATE_SERVICE_HOST": "10.96.0.1",
        "TRITONGATE_KSERVE_HTTP_PORT": "tcp://10.96.0.2:8000",  # of a service `tritongate-kserve-http`
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert (settings.port, settings.kserve_http_port) == (8080, None)
    assert unknown_variables() == sorted(told)


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
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"in the clone, pip install '\.\[tracing\]'"):
        load_settings({"trace_endpoint": "http://collector:4318/v1/traces"})


MEASURED = {"max_loaded_gib": 9, "models": {"m": {"memory_gib": 9}}}


@pytest.mark.parametrize(
    "rule", [{"max_loaded_models": 2}, MEASURED, {"unload_idle_s": 9}, {"pinned_models": "m"}]
)
def test_rules_of_loading_need_loading(rule: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="need load_on_demand"):
        load_settings(rule)
    assert load_settings(rule | {"load_on_demand": True}).load_on_demand


@pytest.mark.parametrize(
    ("models", "wrong"),
    [
        ([], "needs models with their memory_gib"),
        (["m"], "models.m.memory_gib: max_loaded_gib needs it"),
        ({"m": {"memory_gib": 10}}, "models.m.memory_gib: more than max_loaded_gib"),
        (
            {"m": {"memory_gib": 3}, "n": {"entry": "m", "memory_gib": 4}},
            "models.n.memory_gib: not as for 'm', which is the same entry",
        ),
    ],
)
def test_a_limit_on_memory_needs_that_of_each_model(models: object, wrong: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_settings({"max_loaded_gib": 9, "load_on_demand": True, "models": models})
    assert wrong in str(raised.value)


def test_a_port_serves_one_thing() -> None:
    with pytest.raises(ConfigurationError, match="must differ"):
        load_settings({"port": 8000, "kserve_http_port": 8000})
    with pytest.raises(ConfigurationError, match="must differ"):
        load_settings({"kserve_http_port": 8001, "kserve_grpc_port": 8001})
    load_settings({"port": 0, "kserve_http_port": 0, "kserve_grpc_port": 0})


@pytest.mark.parametrize("value", ["tuned", "=m", "tuned=", "m=m", "tuned=a,tuned=b"])
def test_adapters_are_names_with_their_models(value: str) -> None:
    with pytest.raises(ConfigurationError, match="adapter"):
        load_settings({"upstreams": "a:1", "adapters": value})
    assert load_settings({"upstreams": "a:1", "adapters": "t=m,u=m"}).adapters == ("t=m", "u=m")


def test_adapters_of_no_model_are_named() -> None:
    with pytest.raises(ConfigurationError) as error:
        load_settings({"models": "m,n", "adapters": "t=m,u=gone,n=m"})
    assert str(error.value).splitlines() == [
        "adapters: 'u' is for 'gone', which is no model",
        "adapters: 'n' is a model already",
    ]


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
    monkeypatch.setattr(values, "_QUOTA", tmp_path / "absent")
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
    monkeypatch.setattr(values, "_QUOTA", path)
    assert load_settings().workers == workers


@pytest.mark.parametrize("value", ["0", "65", "automatic", "2.5"])
def test_a_number_of_workers_is_one(value: str) -> None:
    with pytest.raises(ConfigurationError, match="workers"):
        load_settings({"workers": value})
