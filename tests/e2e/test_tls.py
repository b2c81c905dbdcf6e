"""TLS all the way, with the real Triton: clients, two workers, mutual TLS to Triton, and a file of keys."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.manifest_triton import MODEL, RESTRICTED_KEY, ManifestTriton
from tests.e2e.up_process import TRITONGATE, metric
from tests.gateway.certificates import self_signed
from tests.ports import free_ports
from tests.processes import Command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_keys_models_and_metrics_by_tls(tmp_path: Path) -> None:
    server, own, clients = (self_signed(tmp_path, name) for name in ("server", "own", "clients"))
    tls = {
        "--grpc-use-ssl-mutual": "true",
        "--grpc-server-cert": server.cert,
        "--grpc-server-key": server.key,
        "--grpc-root-cert": own.cert,
    }
    keys = tmp_path / "keys.yaml"
    keys.write_text("api_keys: [{name: a, key: sk-first, tokens_per_day: 1}]")
    port, metrics_port = free_ports(2)
    triton = ManifestTriton(tmp_path / "triton", changes=tls)
    flags = {
        "--upstreams": triton.grpc,
        "--upstream-ca": server.cert,
        "--upstream-cert": own.cert,
        "--upstream-key": own.key,
        "--tls-cert": clients.cert,
        "--tls-key": clients.key,
        "--keys-file": str(keys),
        "--metrics-address": f"127.0.0.1:{metrics_port}",
        "--port": str(port),
        "--host": "0.0.0.0",  # noqa: S104 - so that metrics need a key
        "--workers": "2",
    }
    triton.start()
    words = [word for pair in flags.items() for word in pair]
    key = {"TRITONGATE_REPOSITORY_KEY": f"admin-key={RESTRICTED_KEY}"}
    gateway = Command(TRITONGATE, "serve", *words, env=key)
    trusted = ssl.create_default_context(cafile=clients.cert)
    try:

        def get(path: str, bearer: str = "", *, at: int = port) -> httpx.Response | None:
            headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
            try:  # each time another connection, and so perhaps another worker
                return httpx.get(f"https://127.0.0.1:{at}{path}", headers=headers, verify=trusted, timeout=20)
            except httpx.TransportError:
                return None

        def is_(status: int, path: str, bearer: str = "", *, at: int = port) -> bool:
            answer = get(path, bearer, at=at)
            return answer is not None and answer.status_code == status

        def ask(bearer: str) -> httpx.Response:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "你好"}], "max_tokens": 2}
            return httpx.post(
                f"https://127.0.0.1:{port}/v1/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {bearer}"},
                verify=trusted,
                timeout=60,
            )

        wait(lambda: is_(200, "/health/ready"))
        first = ask("sk-first")
        assert first.status_code == 200, (first.text, gateway.output)
        wait(lambda: ask("sk-first").status_code == 429)
        refused = [ask("sk-first") for _ in range(6)]
        assert {each.json()["error"]["code"] for each in refused} == {"insufficient_quota"}
        assert is_(401, "/metrics")
        assert is_(200, "/metrics", at=metrics_port)
        assert is_(404, "/v1/models", "sk-first", at=metrics_port)
        keys.write_text("api_keys: [{name: b, key: sk-second}]")

        def reloads() -> list[float]:
            """Return how often each worker has read the file anew: one may be asked six times in a row."""
            found, name = get("/metrics", at=metrics_port), "tritongate_keys_file_reloads_total"
            text = "" if found is None else found.text
            return [metric(text, name, outcome="applied", worker=worker) for worker in ("0", "1")]

        wait(lambda: reloads() == [1, 1])
        assert all(is_(401, "/v1/models", "sk-first") for _ in range(6))
        assert all(is_(200, "/v1/models", "sk-second") for _ in range(6))
        assert ask("sk-second").status_code == 200
        assert "sk-first" not in gateway.output
        assert "sk-second" not in gateway.output
    finally:
        gateway.close()
        triton.close()
