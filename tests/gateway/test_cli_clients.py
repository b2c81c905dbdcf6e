from typing import Any

import pytest
from click.testing import CliRunner

import gateway.cli_clients
from gateway.cli import main
from gateway.remote import RemoteError
from gateway.timing import Timing, TimingError


@pytest.fixture
def gateway_asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a gateway would have been asked; it has `m`, on two Tritons."""
    asked: list[Any] = []

    class Gateway:
        def __init__(self, url: str, key: str | None) -> None:
            self.to = (url, key)

        def change_model(self, model: str, action: str, options: Any) -> Any:
            asked.append((*self.to, model, action, options))
            if model != "m":
                raise RemoteError("no such model (404)")
            changes = [{"upstream": "a:1", "entries": ["m"]}, {"upstream": "b:1", "entries": []}]
            unloaded = {"unloaded": True} if action == "unload" else {}
            return {"model": {"ready": action == "load", **unloaded}, "changes": changes}

    monkeypatch.setattr(gateway.cli_clients, "RemoteGateway", Gateway)
    return asked


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments, env=environment)
    return result.exit_code, result.output


def test_load(gateway_asked: list[Any]) -> None:
    status, text = run("load", "m", "--url", "http://g", "--key", "k", "--reload", "--upstream", "a:1")
    assert (status, text) == (0, "a:1: loaded m\nb:1: nothing to load\nm is ready\n")
    assert gateway_asked == [("http://g", "k", "m", "load", {"reload": True, "upstream": "a:1"})]


def test_unload_with_the_key_of_the_environment(gateway_asked: list[Any]) -> None:
    status, text = run("unload", "m", TRITONGATE_KEY="secret")
    assert (status, text.splitlines()[-1]) == (0, "m is unloaded")
    assert gateway_asked == [("http://127.0.0.1:8080", "secret", "m", "unload", {"upstream": None})]


@pytest.mark.parametrize("command", ["load", "unload"])
def test_a_refusal_is_status_1_in_one_line(command: str, gateway_asked: list[Any]) -> None:
    assert run(command, "x") == (1, "Error: no such model (404)\n")
    assert run(command)[0] == 2
    assert run(command, "m", "--url", "http://g", "--reloadd")[0] == 2


def timing(protocol: str, failed: int = 0) -> Timing:
    return Timing(
        protocol=protocol,
        answered=40,
        failed=failed,
        seconds=1.5,
        min=1.0,
        mean=20.25,
        p50=3.0,
        p90=4.0,
        p99=5.0,
        max=600.0,
        first_failure="bad shape" if failed else None,
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def measure(protocol: str, connect: Any, work: Any) -> Timing:
        calls.append((protocol, work))
        return timing(protocol, failed=int(work.model == "bad"))

    def read_inputs(address: str, work: Any) -> list[Any]:
        if work.model == "absent":
            raise TimingError("unknown model: absent")
        return []

    monkeypatch.setattr(gateway.cli_clients, "measure", measure)
    monkeypatch.setattr(gateway.cli_clients, "read_inputs", read_inputs)
    return calls


def test_bench_shows_protocols_side_by_side(measured: list[Any]) -> None:
    status, text = run("bench", "--model", "m", "--concurrency", "2", "--count", "3", "--max-token", "9")
    assert status == 0
    lines = [line.split() for line in text.splitlines()[1:]]
    assert lines[0] == ["protocol", "grpc", "http"]
    assert ["mean", "20.2", "20.2"] in lines
    assert ["answered", "40", "40"] in lines
    assert len({len(line) for line in text.splitlines()[1:]}) == 1
    assert [protocol for protocol, _ in measured] == ["grpc", "http"]
    assert (measured[0][1].concurrency, measured[0][1].count, measured[0][1].max_token) == (2, 3, 9)
    assert run("bench", "--model", "m", "--protocol", "http")[0] == 0
    assert measured[2][0] == "http"


def test_bench_fails_loudly(measured: list[Any]) -> None:
    status, text = run("bench", "--model", "bad", "--protocol", "grpc")
    assert status == 1
    assert "bad shape" in text
    assert run("bench", "--model", "absent") == (1, "Error: unknown model: absent\n")
    assert run("bench")[0] == 2
