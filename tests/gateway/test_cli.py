import asyncio
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import gateway.cli
from gateway.cli import greeting, main
from gateway.commands.reach import Finding
from gateway.process.listeners import base_url, bind, bind_gateway, claim
from gateway.settings import Settings, settings_table
from gateway.settings.values import Scope, revealed
from gateway.up import Replica, triton_command
from tests.gateway.serving import settings
from wire.events import Ready

READY = Ready(grpc="127.0.0.1:1", metrics="127.0.0.1:3", repository_key="some=key", models=["m", "n"])
KSERVE = ["--kserve-http-port", "0", "--kserve-grpc-port", "0"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server and Triton would have been run with."""
    calls: list[Any] = []

    def run_gateway(settings: Settings, **_: Any) -> int:
        calls.append(settings)
        return 0

    def run_up(replicas: list[Replica], serve: Any, _out: Any, *, meanwhile: Any) -> int:
        calls.append(replicas)
        meanwhile()
        code: int = serve([f"127.0.0.1:{number}" for number in range(1, len(replicas) + 1)], READY, print)
        return code

    monkeypatch.setattr("gateway.process.workers.run", run_gateway)
    monkeypatch.setattr(gateway.cli, "run_up", run_up)
    return calls


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_every_setting_has_its_flag() -> None:
    status, text = run("serve", "--help")
    assert status == 0
    for row in settings_table():
        assert row.env in text or row.flag is None
        assert row.flag is None or row.flag in text


def test_every_command_is_described_in_a_line() -> None:
    lines = run("--help")[1].partition("Commands:\n")[2].splitlines()
    assert len(lines) == len(main.list_commands(click.Context(main)))
    assert not [line for line in lines if line.endswith("...") or len(line) > 80]


def test_up_tells_its_own_defaults(served: list[Any]) -> None:
    """They were those of `serve`, and the engine's flags had none."""
    text = " ".join(run("up", "--help")[1].split()).replace("- ", "-")  # where a line was broken
    assert "default: warning, or info with --log-format; env: TRITONGATE_LOG_LEVEL" in text
    assert "default: plain, or json with --log-level; env: TRITONGATE_LOG_FORMAT" in text
    assert "default: 5, which is the most; env: TRITONGATE_DRAIN_S" in text
    for flag in ("--log-format=text", "--log-level=error"):
        assert run("up", "--port", "0", *KSERVE, flag)[0] == 0
    assert (served[1].log_level, served[3].log_format) == ("info", "json")


def test_serve_has_no_flag_for_a_key() -> None:
    status, text = run("serve", "--api-key", "s3cret")
    assert status == 2
    assert "`serve` has no --api-key: use --keys-file or TRITONGATE_API_KEYS" in text
    assert "--api-key" not in run("serve", "--help")[1].replace("`up` has --api-key", "")


def test_serve(served: list[Any]) -> None:
    assert run("serve", "--port", "0", "--models", "a,b", "--allow-anonymous", "--host", "::")[0] == 0
    assert (served[0].port, [*served[0].models], served[0].allow_anonymous) == (0, ["a", "b"], True)


@pytest.mark.parametrize("command", ["serve", "check", "up"])
def test_wrong_settings_are_status_2(command: str, served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("prot: 1")
    for arguments in (["--port", "x"], ["--config", str(file)], ["--config", "/absent.yaml"], ["--nope"]):
        status, text = run(command, *arguments)
        assert status == 2
        assert "Error: " in text
        assert "Traceback" not in text
    assert not served


def test_a_taken_port_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.cli, "run_up", lambda *_: pytest.fail("Triton was started"))
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        for command in ("serve", "up"):
            for flag in ("--port", "--kserve-http-port", "--kserve-grpc-port"):
                ports = {"--port": "0", "--kserve-http-port": "0", "--kserve-grpc-port": "0"}
                ports[flag] = str(taken.getsockname()[1])
                status, text = run(command, *(word for pair in ports.items() for word in pair))
                assert status == 1
                assert f"Address already in use; {flag} chooses another port" in text


@pytest.mark.parametrize(
    "flag", ["--port=8003", "--metrics-address=127.0.0.1:8003", "--kserve-grpc-port=8003"]
)
def test_a_port_of_tritons_metrics_is_not_the_gateways(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found out once Triton had started, and then all ended."""
    monkeypatch.setattr(gateway.cli, "run_up", lambda *_: pytest.fail("Triton was started"))
    status, text = run("up", "--replicas", "2", *KSERVE, "--port=0", flag)
    assert status == 2
    assert "8003" in text
    assert "--metrics-port chooses another" in text


def test_triton_clients_are_served_where_triton_used_to_be(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def bind_gateway(settings: Settings) -> list[Any]:
        asked.append((settings.port, settings.kserve_http_port, settings.kserve_grpc_port))
        return []

    monkeypatch.setattr("gateway.process.listeners.bind_gateway", bind_gateway)
    run("up", "--port", "8080")
    run("up", "--kserve-http-port", "9000")
    run("up", "--port", "8000")
    run("up", "--metrics-address", "127.0.0.1:8001")
    assert asked == [(8080, 8000, 8001), (8080, 9000, 8001), (8000, None, 8001), (8080, 8000, None)]
    assert run("serve")[0] == 0
    assert (served[-1].kserve_http_port, served[-1].kserve_grpc_port) == (None, None)


def test_up(served: list[Any]) -> None:
    arguments = [
        "--model",
        "a=/x",
        "--model",
        "/y",
        "--metrics-port",
        "0",
        "--engine",
        "own",
        "--dtype",
        "float32",
        "--quantization",
        "int8",
        "--port",
        "0",
    ]
    limits = ["--max-waiting", "3", "--max-batched-tokens", "9", "--burst-tokens", "12"]
    limits += ["--burst-steps", "0", "--draft-tokens", "4"]
    contracts = ["--contract", "a=unbatched", "--contract", "batched"]
    assert run("up", *arguments, *KSERVE, "--device", "cpu", *limits, *contracts)[0] == 0
    (replica,), settings = served
    assert replica.command == triton_command(
        model=("a=/x", "/y"),
        metrics_port=0,
        device="cpu",
        memory_share=0.5,
        engine="own",
        dtype="float32",
        quantization="int8",
        max_batched_tokens=9,
        burst_tokens=12,
        burst_steps=0,
        draft_tokens=4,
    )
    assert (settings.upstreams, [*settings.models], settings.max_waiting) == (("127.0.0.1:1",), ["m", "n"], 3)
    assert (settings.drain_s, settings.log_level, settings.log_format) == (5.0, "warning", "plain")
    assert revealed(settings.repository_key) == "some=key"
    assert settings.contract == ("a=unbatched", "batched")
    assert (settings.kserve_http_port, settings.kserve_grpc_port) == (0, 0)


def test_one_gateway_serves_all_replicas(served: list[Any]) -> None:
    assert run("up", "--port", "0", *KSERVE, "--device", "cuda:0,cuda:1", "--replicas", "2")[0] == 0
    replicas, settings = served
    assert [replica.name for replica in replicas] == ["Replica 1 (cuda:0)", "Replica 2 (cuda:1)"]
    assert settings.upstreams == ("127.0.0.1:1", "127.0.0.1:2")
    assert settings.max_in_flight == 2 * Settings.model_fields["max_in_flight"].default
    assert run("up", "--port", "0", *KSERVE, "--replicas", "2", "--max-in-flight", "9")[0] == 0
    assert served[-1].max_in_flight == 9
    status, text = run("up", "--device", "cuda:0,auto")
    assert (status, "auto stands alone" in text) == (2, True)


def test_up_serves_the_names_of_a_models_file(served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {pub: {entry: m}}")
    assert run("up", *KSERVE, "--port", "0", "--models-file", str(file))[0] == 0
    _, settings = served
    assert settings.model("pub").entry == "m"
    assert settings.model("pub").upstreams == ("127.0.0.1:1",)
    assert [*settings.models] == ["pub"]


def test_up_refuses_names_of_what_it_does_not_serve(served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {there: {entry: x, upstreams: 'other:1'}, pub: {entry: o}}")
    status, text = run("up", *KSERVE, "--port", "0", "--models-file", str(file))
    assert (status, "models.pub.entry: 'o' is not served here; these are: m, n" in text) == (2, True)
    assert len(served) == 1


def test_up_says_what_its_workers_would_not_take(served: list[Any], tmp_path: Path) -> None:
    """Its key would go elsewhere in clear text; an adapter's model is none of its own."""
    file = tmp_path / "models.yaml"
    file.write_text("models: {m: {}, there: {entry: x, upstreams: 'other:1'}}")
    arguments = ["up", *KSERVE, "--port", "0", "--models-file", str(file)]
    status, text = run(*arguments)
    assert (status, "repository_key: it would go to other:1 in clear text" in text) == (2, True)
    assert run(*arguments, "--plain-repository-key")[0] == 0
    status, text = run("up", *KSERVE, "--port", "0", "--adapters", "tuned=elsewhere")
    assert (status, "adapters: 'tuned' is for 'elsewhere', which is no model" in text) == (2, True)


def test_up_keeps_what_was_asked_for(served: list[Any]) -> None:
    assert run("up", "--port", "0", *KSERVE, "--drain-s", "1", "--log-level", "info")[0] == 0
    assert (served[1].drain_s, served[1].log_level) == (1.0, "info")


def test_up_takes_one_key_that_goes_no_further(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITONGATE_API_KEYS", '[{"name": "other", "key": "other"}]')
    arguments = ["up", "--port", "0", "--host", "0.0.0.0", *KSERVE, "--api-key", "s3cret"]  # noqa: S104
    status, text = run(*arguments)
    replicas, settings = served
    assert status == 0
    assert [revealed(key.key) for key in settings.api_keys] == ["s3cret"]
    assert settings.api_keys[0].scopes == set(Scope)
    assert "s3cret" not in f"{text}{replicas}{settings}"
    (tmp_path / "keys.yaml").write_text("api_keys: [{name: a, key: b}]")
    for more, words in (
        (["--api-key", ""], "--api-key: the key is empty"),
        (["--api-key", " s3cret"], "white space, which a header does not carry (from flag --api-key)"),
        (["--keys-file", str(tmp_path / "keys.yaml")], "give one of the two"),
    ):
        status, text = run(*arguments, *more)
        assert (status, words in text, "s3cret" in text) == (2, True, False)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8"])
def test_up_refuses_what_it_cannot(dtype: str, served: list[Any]) -> None:
    assert run("up", "--dtype", dtype)[0] == 2
    assert not served


def test_the_greeting_is_a_command(tmp_path: Path) -> None:
    bare = settings(workers=1, chat_page=False)
    keyed = settings(api_keys=[{"name": "a", "key": "b"}])
    (alone,) = bind_gateway(bare)
    (listeners,) = bind_gateway(settings(workers=1, kserve_http_port=0, kserve_grpc_port=0))
    text = greeting("http://127.0.0.1:1", ["it's", "n"], alone, bare)
    assert "Triton" not in text
    assert "Chat page" not in text
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("curl")))
    assert command[1] == "http://127.0.0.1:1/v1/chat/completions"
    assert json.loads(command[-1])["model"] == "it's"
    text = greeting("u", ["m"], listeners, keyed)
    assert "\nChat page: u/\n" in text
    assert "Authorization: Bearer $KEY" in text
    assert f"(for clients of Triton: HTTP {base_url(listeners.http[1])}, gRPC {listeners.grpc})\n" in text
    for each in (alone, listeners):
        each.close()


@pytest.mark.parametrize("ok", [True, False])
def test_check(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    async def found(_settings: Settings, *, timeout_s: float) -> list[Finding]:
        await asyncio.sleep(0)
        return [Finding(ok=ok, text=f"upstream within {timeout_s}")]

    monkeypatch.setattr("gateway.commands.check.check", found)
    status, text = run("check", "--timeout-s", "2")
    assert status == (0 if ok else 1)
    assert "upstream within 2.0" in text


@pytest.mark.parametrize(
    ("command", "asks"),
    [
        (("check",), "gateway.commands.check.check"),
        (("models",), "gateway.commands.models.models_of"),
        (("prompt", "--model", "m"), "gateway.commands.models.prompt_of"),
        (("chat", "-q", "hi"), "gateway.commands.chat.models_at"),
    ],
)
def test_ctrl_c_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], asks: str
) -> None:
    """For `check`, the 1 of click's Abort meant that something is not well."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asks, stop)
    done = CliRunner().invoke(main, command, input="[]")
    assert (done.exit_code, "Aborted" in done.output) == (130, False)


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("tritongate")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("tritongate ")


UP = ["up", "--port", "0"]
SERVE = ["serve", "--port", "0", "--workers", "1", "--upstreams", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (UP, "click"),
        (UP, "gateway.settings"),
        (UP, "gateway.process.workers"),  # what comes later is imported while Triton starts
        (SERVE, "gateway.app"),
        (SERVE, "gateway.kserve.grpc"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported_is_a_word(
    arguments: list[str], module: str, number: signal.Signals
) -> None:
    """Without a handler a container's first process would never get a SIGTERM."""
    program = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number:d})
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = {arguments!r}
import gateway.commands
gateway.commands.run()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "stopping\n")


def test_a_port_of_a_start_under_way_is_taken(served: list[Any]) -> None:
    with bind("127.0.0.1", 0) as other, claim(other):
        status, text = run("up", "--port", str(other.getsockname()[1]), *KSERVE)
    assert (status, "another tritongate is starting" in text) == (1, True)
    assert not served[1:]
