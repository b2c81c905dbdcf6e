"""What docker-compose.yml says, beside what the code reads."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from deploy.docker.start_triton import main as start_triton
from gateway.settings import load_settings, settings_table
from gateway.up import METRICS_PORT
from tests.deploy.compose_file import (
    CHOSEN,
    COMPOSE_FILE,
    EXAMPLE_ENV,
    EXAMPLE_KEYS,
    ROOT,
    entrypoint,
    load_compose,
    read_env,
    variables,
)

OURS = ("triton", "triton-cpu", "gateway")
FROM_ELSEWHERE = ("prometheus", "grafana")
SHA = "0" * 64
FIRST_WITHOUT_FAULTS = "26.07"
"""The release that NVIDIA's newest bulletin asks for (5875)."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load_compose(read_env(EXAMPLE_ENV) | CHOSEN)


def services(compose: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from compose["services"].items()


@pytest.mark.parametrize("name", ["gateway", "grafana"])
def test_health_checks_ask_no_proxy(compose: dict[str, Any], name: str) -> None:
    """Docker sets its variables in every container where its client is told of a proxy."""
    command: list[str] = compose["services"][name]["healthcheck"]["test"][1:]
    if command[0] == "wget":
        assert command[1:3] == ["-Y", "off"]
        assert compose["services"][name]["environment"]["NO_PROXY"] == "prometheus"
        return
    answers = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    with answers, ThreadPoolExecutor(1) as pool:
        pool.submit(answers.handle_request)
        code = command[-1].replace(":8080/health/ready", f":{answers.server_port}/")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"http_proxy": "http://127.0.0.1:1"},
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:  # ends the thread
            socket.create_connection(("127.0.0.1", answers.server_port)).close()
    assert done.returncode == 0, done.stderr


def test_it_is_a_compose_file() -> None:
    check = Path(sys.executable).with_name("check-jsonschema")
    command = [check, "--builtin-schema", "vendor.compose-spec", COMPOSE_FILE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CHOSEN)
def test_no_secret_is_ours(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        load_compose(read_env(EXAMPLE_ENV) | CHOSEN | {name: ""})


def test_the_example_has_every_variable_and_no_other() -> None:
    written = set(re.findall(r"^#?([A-Z_]+)=", EXAMPLE_ENV.read_text(encoding="utf-8"), re.MULTILINE))
    assert written - {"COMPOSE_PROFILES"} == variables()
    profiles = {each for _, service in services(load_all()) for each in service.get("profiles", [])}
    assert read_env(EXAMPLE_ENV)["COMPOSE_PROFILES"] in profiles


def load_all() -> dict[str, Any]:
    return load_compose(CHOSEN)


def test_the_examples_defaults_are_the_files(compose: dict[str, Any]) -> None:
    """A line that is commented out says what holds without it."""
    text = EXAMPLE_ENV.read_text(encoding="utf-8")
    commented = dict(re.findall(r"^#([A-Z_]+)=(.*)$", text, re.MULTILINE))
    assert commented
    assert load_compose(read_env(EXAMPLE_ENV) | commented | CHOSEN) == compose


def test_every_variable_of_the_gateway_is_a_setting(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {row.env for row in settings_table()}
    given = compose["services"]["gateway"]["environment"] | read_env(EXAMPLE_KEYS)
    assert set(given) <= known
    for name, value in given.items():
        monkeypatch.setenv(name, re.sub(r"<.*>", SHA, value))
    settings = load_settings()
    assert settings.api_keys[0].sha256 == (SHA,)
    for _, service in services(compose):
        others = set(service.get("environment", {})) - set(given)
        assert not [name for name in others if name.startswith("TRITONGATE_")]


def test_the_gateways_command_and_defaults(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    assert [*entrypoint(gateway), *gateway["command"]] == ["tritongate", "serve"]
    defaults = {row.env: row.default for row in settings_table()}
    for name in ("TRITONGATE_PORT", "TRITONGATE_MAX_IN_FLIGHT", "TRITONGATE_MAX_WAITING"):
        assert gateway["environment"][name] == defaults[name]
    for name in ("triton", "triton-cpu"):  # the same key
        triton = compose["services"][name]["environment"]
        assert triton["TRITONGATE_REPOSITORY_KEY"] == gateway["environment"]["TRITONGATE_REPOSITORY_KEY"]


def test_the_ports_are_the_ones_that_are_served(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    port = gateway["environment"]["TRITONGATE_PORT"]
    doors = {name: gateway["environment"][f"TRITONGATE_KSERVE_{name}_PORT"] for name in ("HTTP", "GRPC")}
    assert [each.rpartition(":")[2] for each in gateway["ports"]] == [port, *doors.values()]
    assert doors == {"HTTP": "8000", "GRPC": "8001"}, "where clients of a Triton look for it"
    assert f":{port}/health/ready" in " ".join(gateway["healthcheck"]["test"])
    tritons = [compose["services"][name] for name in ("triton", "triton-cpu")]
    metrics_port = METRICS_PORT
    for triton in tritons:
        flags = dict(word.removeprefix("--").split("=", 1) for word in triton["command"] if "=" in word)
        assert flags["metrics-port"] == str(metrics_port)
        assert gateway["environment"]["TRITONGATE_UPSTREAMS"] == f"triton:{flags['grpc-port']}"
        checked = dict(word.split("=", 1) for word in triton["healthcheck"]["test"] if "=" in word)
        assert checked["--grpc"] == f"127.0.0.1:{flags['grpc-port']}"
        assert checked["--metrics"] == f"127.0.0.1:{metrics_port}"
        assert triton["networks"] == {"inside": {"aliases": ["triton"]}}
    scraped = (ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8")
    scraped_port = gateway["environment"]["TRITONGATE_METRICS_ADDRESS"].rpartition(":")[2]
    assert f"[gateway:{scraped_port}]" in scraped
    assert f"[triton:{metrics_port}]" in scraped
    source = (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    listening = next(word for word in compose["services"]["prometheus"]["command"] if "listen" in word)
    assert f"http://prometheus:{listening.rpartition(':')[2]}" in source


@pytest.mark.parametrize("name", ["triton", "triton-cpu"])
def test_the_start_of_triton_knows_its_flags(compose: dict[str, Any], name: str) -> None:
    command = compose["services"][name]["command"]
    own = command[: command.index("--")]
    result = CliRunner().invoke(start_triton, [*own, "--help"])
    assert result.exit_code == 0, result.output
    result = CliRunner(env=compose["services"][name]["environment"]).invoke(start_triton, own)
    assert "No such option" not in result.output
    assert "/checkpoint is not a directory" in result.output


def test_triton_cannot_be_reached_from_outside(compose: dict[str, Any]) -> None:
    assert compose["networks"]["inside"] == {"internal": True}
    for name, service in services(compose):
        networks = set(service["networks"])
        assert bool(service.get("ports")) == (name in {"gateway", "grafana"}) == ("edge" in networks), name
        assert all(each.startswith("127.0.0.1:") for each in service.get("ports", [])), name
    for name in ("triton", "triton-cpu"):
        assert "--model-control-mode=none" in compose["services"][name]["command"]


def test_every_service_is_confined(compose: dict[str, Any]) -> None:
    assert {*OURS, *FROM_ELSEWHERE} == set(compose["services"])
    for name, service in services(compose):
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert service["user"].split(":")[0] not in {"", "0", "root"}, name
        assert {"memory", "pids"} <= set(service["deploy"]["resources"]["limits"]), name
        assert service["healthcheck"]["test"][0] == "CMD", name
        binds = [volume for volume in service.get("volumes", []) if volume[0] in "./"]
        assert all(volume.endswith(":ro") for volume in binds), name


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    for name, service in services(compose):
        image, _, tag = service["image"].rpartition(":")
        assert image, name
        assert tag != "latest", name
        assert ("build" in service) == (name in OURS)
    for name in OURS:
        text = (ROOT / compose["services"][name]["build"]["dockerfile"]).read_text(encoding="utf-8")
        assert not re.search(r"^FROM [^$\n]*:latest|^ARG \w+=latest", text, re.MULTILINE)


def test_triton_has_no_published_fault(compose: dict[str, Any]) -> None:
    text = (ROOT / "deploy/docker/triton.Dockerfile").read_text(encoding="utf-8")
    (release,) = re.findall(r"^ARG TRITON=(.+)$", text, re.MULTILINE)
    assert release >= FIRST_WITHOUT_FAULTS
    for name in ("triton", "triton-cpu"):
        assert compose["services"][name]["build"]["args"]["TRITON"] == release


def test_what_is_mounted_is_there(compose: dict[str, Any]) -> None:
    for name, service in services(compose):
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), (name, source)
            elif not source.startswith("/"):
                assert source in compose["volumes"], (name, source)


def test_grafana_finds_the_dashboards(compose: dict[str, Any]) -> None:
    grafana = compose["services"]["grafana"]
    mounts = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    provider = ROOT / "deploy/grafana/provisioning/dashboards/tritongate.yml"
    (provided,) = yaml.safe_load(provider.read_text(encoding="utf-8"))["providers"]
    folder = ROOT / mounts[provided["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home.parent == Path(provided["options"]["path"])
    assert (folder / home.name).is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/docker").glob("*.Dockerfile")), ids=lambda p: p.stem)
def test_dockerfiles(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--config", ROOT / ".hadolint.yaml", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^USER (\d+):", text, re.MULTILINE)[-1] != "0"
    # The context is an allow list: what is copied must be on it, and must be there.
    allowed = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE))
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(each + "/") for each in allowed), source


def test_the_gateways_image_has_the_gateway_only() -> None:
    text = (ROOT / "deploy/docker/gateway.Dockerfile").read_text(encoding="utf-8")
    copied = set(" ".join(re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)).split())
    assert {"gateway", "wire"} <= copied
    assert "triton_models" not in copied
    assert "[engine]" not in text


def test_the_gateways_image_has_what_settings_need() -> None:
    text = (ROOT / "deploy/docker/gateway.Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    needed = re.findall(r"needs the extra `(\w+)`", "".join(row.help for row in settings_table()))
    assert set(extras.split(",")) == set(needed)
