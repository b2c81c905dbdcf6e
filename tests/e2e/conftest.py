"""Servers that are started once for all tests that do not break them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from gateway.triton.pool import TritonUpstream
from tests.e2e.foreign_server import Foreign, foreign_server
from tests.e2e.long_answers import write_long_answers
from tests.e2e.manifest_triton import ManifestTriton
from tests.e2e.mix_server import Mix, mix_server
from tests.e2e.relay import Relay
from tests.e2e.scripted_triton import Scripted, ready, scripted_triton, upstream_of
from tests.e2e.serve_process import ServeProcess
from tests.e2e.stock_server import REPOSITORY, StockServer, built, by_hand, stock_server
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import GOLDEN, UpProcess
from tests.otlp_receiver import Receiver

if TYPE_CHECKING:
    from tests.e2e.families_server import Families


@pytest.fixture(scope="session")
def up() -> Iterator[UpProcess]:
    models = [text for name in ("chatglm3", "chatglm2") for text in ("--model", str(GOLDEN / name))]
    process = UpProcess(*models, "--dtype", "float32", "--vllm-metrics")
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture
def own_up(tmp_path: Path) -> Iterator[UpProcess]:
    """One that a test may break, amid long answers."""
    process = UpProcess("--model", str(write_long_answers(tmp_path / "chatglm3")), "--no-resume")
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture(scope="session")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """One whose answers may be so long that whatever a test does meanwhile is done well before they end."""
    folder = write_long_answers(tmp_path_factory.mktemp("patient") / "chatglm3")
    process = UpProcess("--model", str(folder), "--dtype", "float32", "--draft-tokens", "0")
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture(scope="session")
def relay(patient: UpProcess) -> Iterator[Relay]:
    """Between a gateway and a Triton of long answers, which it can be kept from hearing of."""
    relay = Relay(patient.triton_grpc)
    yield relay
    relay.close()


@pytest.fixture(scope="session")
def beside(up: UpProcess) -> Iterator[ServeProcess]:
    """Another gateway before the Triton of `up`, where chatglm3 has the unbatched contract."""
    arguments = ("--models", "chatglm3,chatglm2", "--contract", "chatglm3=unbatched")
    with ServeProcess(up.triton_grpc, *arguments) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def triton(up: UpProcess) -> Iterator[StreamClient]:
    client = StreamClient(up.triton_grpc, up.repository_key)
    yield client
    client.close()


@pytest.fixture
def sdk(up: UpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def demo_up() -> Iterator[UpProcess]:
    """The built-in model, which is what `tritongate up` serves unless it is told otherwise."""
    process = UpProcess()
    try:
        yield process.wait_ready()
        assert process.stop() == 0
    finally:
        process.close()


@pytest.fixture(scope="session")
def demo(demo_up: UpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_up.base_url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def collector() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def traced(collector: Receiver) -> Iterator[UpProcess]:
    """One model behind two gateway processes, whose traces the collector gets; as if without a C compiler."""
    model = ("--model", str(GOLDEN / "chatglm3"), "--workers", "2")
    trace = ("--trace-endpoint", collector.endpoint, "--trace-sample", "0")
    process = UpProcess(*model, *trace, CC="none")
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture(scope="session")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mix]:
    with mix_server(tmp_path_factory.mktemp("mix")) as running:
        yield running


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Families"]:
    from tests.e2e.families_server import families_server  # noqa: PLC0415 - brings torch and transformers

    with families_server(tmp_path_factory.mktemp("families")) as running:
        yield running


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ManifestTriton]]:
    """Two Tritons that run as the manifests have them. The last test that has them ends them."""
    folder = tmp_path_factory.mktemp("fleet")
    made = [ManifestTriton(folder / f"triton-{number}") for number in range(2)]
    try:
        for triton in made:
            triton.start()
        for triton in made:
            triton.wait_ready()
        yield made
    finally:
        for triton in made:
            triton.close()


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockServer]:
    """The committed repository; written by hand, an entry `glm` of ChatGLM3 and ChatGLM2; a built one."""
    folder = tmp_path_factory.mktemp("stock")
    with stock_server(REPOSITORY, by_hand(folder), built(folder), temporary=folder) as server:
        yield server


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    with foreign_server(tmp_path_factory.mktemp("foreign")) as foreign:
        yield foreign


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted_triton(tmp_path_factory.mktemp("repository")) as scripted:
        yield scripted


@pytest.fixture
async def upstream(scripted: Scripted) -> AsyncIterator[TritonUpstream]:
    async with upstream_of(scripted) as upstream:
        await ready(upstream)
        yield upstream
