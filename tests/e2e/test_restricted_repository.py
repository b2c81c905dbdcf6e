"""A Triton whose repository is restricted by a key: who may load, and what is said to those who may not."""

from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest
from click.testing import CliRunner
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.cli import main
from tests.e2e.manifest_triton import MODEL, RESTRICTED_KEY, ManifestTriton
from tests.e2e.serve_process import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

KEYS = (None, "admin-key=another", f"other={RESTRICTED_KEY}")


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManifestTriton]:
    """The manifest's, but for the mode: nothing else keeps anybody from loading."""
    changes = {"--model-control-mode": "explicit", "--load-model": "*"}
    triton = ManifestTriton(tmp_path_factory.mktemp("triton"), changes=changes)
    try:
        triton.start()
        triton.wait_ready()
        yield triton
    finally:
        triton.close()


@pytest.fixture
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_REPOSITORY_KEY", f"admin-key={RESTRICTED_KEY}")


def change(url: str, action: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/models/{MODEL}/{action}", json={}, timeout=120)


def generate(url: str) -> str | None:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as sdk:
        answer = sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "你好"}],
            max_tokens=4,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].finish_reason


def check(triton: ManifestTriton, key: str | None) -> tuple[int, str]:
    done = CliRunner().invoke(
        main, ["check", "--upstreams", triton.grpc], env={"TRITONGATE_REPOSITORY_KEY": key}
    )
    return done.exit_code, done.output


@pytest.mark.parametrize("key", KEYS)
def test_without_the_key_requests_are_served_and_changes_refused_with_the_reason(
    triton: ManifestTriton, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is not None:
        monkeypatch.setenv("TRITONGATE_REPOSITORY_KEY", key)
    with ServeProcess(triton.grpc, "--models", MODEL) as gateway:
        url = gateway.base_url
        assert generate(url) == "length"
        for action in ("load", "unload"):
            refused = change(url, action)
            assert refused.status_code == 403
            assert "setting repository_key" in refused.json()["error"]["message"]
        assert generate(url) == "length"


def test_with_the_key_models_are_listed_unloaded_and_loaded(triton: ManifestTriton, with_key: None) -> None:
    with ServeProcess(triton.grpc, log_level="debug") as gateway:
        url = gateway.base_url
        listed = httpx.get(url + "/v1/models", timeout=60).json()["data"]
        assert [model["id"] for model in listed] == [MODEL]
        assert change(url, "unload").json()["changes"][0]["entries"] == [MODEL]
        assert change(url, "load").json()["changes"][0]["entries"] == [MODEL]
        assert generate(url) == "length"
    assert '"model loaded"' in gateway.output
    assert RESTRICTED_KEY not in gateway.output


def test_the_check_says_what_is_missing(triton: ManifestTriton) -> None:
    for key in KEYS:
        status, said = check(triton, key)
        assert status == 1
        assert f"upstream {triton.grpc}: not_permitted" in said
        assert "setting repository_key" in said
        assert RESTRICTED_KEY not in said
    assert check(triton, f"admin-key={RESTRICTED_KEY}")[0] == 0


def test_the_restriction_is_tritons_own(triton: ManifestTriton) -> None:
    """What probes and clients ask is open."""
    request = service_pb2.RepositoryIndexRequest()
    with grpc.insecure_channel(triton.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
            stub.RepositoryIndex(request, timeout=60)
        key = (("triton-grpc-protocol-admin-key", RESTRICTED_KEY),)
        listed = stub.RepositoryIndex(request, timeout=60, metadata=key)
        assert [model.name for model in listed.models] == [MODEL]
        assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=60).ready
