from pathlib import Path
from typing import Any

import pytest

from gateway.configuration import ConfigurationError, load_settings, unknown_variables

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
        ({}, {}, "prot: 1", ["prot: unknown setting", "gateway.yaml"]),
        ({}, {}, "api_keys: [{name: a, kee: s3cret}]", ["api_keys.0.kee: unknown key"]),
        ({}, {}, "api_keys: [{name: a}]", ["api_keys.0", "exactly one of key and sha256"]),
        ({}, {}, "api_keys: [{name: a, key: s3cret}, {name: a, key: b}]", ["same name"]),
        ({}, {}, "- 1", ["gateway.yaml", "mapping"]),
        ({}, {}, "port: 1\nkey: s3cret: [", ["gateway.yaml", "line 2"]),
        ({"host": "0.0.0.0"}, {}, "", ["host", "api_keys", "allow_anonymous"]),  # noqa: S104
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


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load_settings(config=tmp_path / "absent.yaml")


def test_a_misspelt_variable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_MAX_INFLIGHT", "3")
    monkeypatch.setenv("TRITONGATE_MAX_IN_FLIGHT", "3")
    monkeypatch.setenv("TRITONGATE_KEY", "a client's")
    assert unknown_variables() == ["TRITONGATE_MAX_INFLIGHT"]
