"""An entry written by hand: a checkpoint is all that it must name. And several versions of one."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.stock_server import StockServer, stock_server
from tests.e2e.stream_client import StreamClient, infer_request
from tests.e2e.up_process import GOLDEN, wait_until
from triton_models.entries import ModelEntry, write_entry
from wire.meta import decode_meta
from wire.strings import unpack_strings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CONFIG = """backend: "python"
parameters {{ key: "checkpoint" value {{ string_value: "{checkpoint}" }} }}
version_policy {{ specific {{ versions: [1, 2] }} }}
"""


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockServer]:
    """An entry `glm`, whose two versions are ChatGLM3 and ChatGLM2."""
    folder = tmp_path_factory.mktemp("by_hand")
    for version, name in (("1", "chatglm3"), ("2", "chatglm2")):
        (folder / "checkpoints" / version).mkdir(parents=True)
        (folder / "checkpoints" / version / "model").symlink_to(GOLDEN / name)
    write_entry(folder / "written", model=ModelEntry(name="glm", checkpoint="unused"))
    code = (folder / "written" / "glm" / "1" / "model.py").read_text()
    for version in ("1", "2"):
        (folder / "repository" / "glm" / version).mkdir(parents=True)
        (folder / "repository" / "glm" / version / "model.py").write_text(code)
    config = CONFIG.format(checkpoint="../../checkpoints/{version}/model")
    (folder / "repository" / "glm" / "config.pbtxt").write_text(config)
    with stock_server(folder / "repository", folder) as server:
        yield server


def test_what_the_configuration_leaves_out_is_filled_in(by_hand: StockServer) -> None:
    config = httpx.get(f"http://{by_hand.http}/v2/models/glm/config", timeout=60).json()
    assert config["max_batch_size"] == 64
    batching = config["dynamic_batching"]
    assert not batching["priority_levels"]
    assert not batching["max_queue_delay_microseconds"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in config["input"]] == ["prompt", "history", "sampling"]
    assert [each["name"] for each in config["output"]] == ["response", "meta"]


def test_each_version_has_its_own_checkpoint_and_metrics(by_hand: StockServer) -> None:
    """Triton itself would let them overwrite each other's gauges."""
    client = StreamClient(by_hand.grpc)
    for version, chat_format in (("1", "chatglm3"), ("2", "chatglm2"), ("", "chatglm2")):
        probe = infer_request("glm", "", "", '{"probe":true}', version=version)
        answer = next(iter(client.send(probe)))
        meta = decode_meta(unpack_strings(answer.infer_response.raw_output_contents[1])[0])
        assert meta.probe.format == chat_format
    client.ask("glm", "你好", max_tokens=2)
    client.close()
    counted = "tritongate_engine_prompt_tokens_total"
    wait_until(lambda: by_hand.gauge(counted, model="glm", version="2") > 0)
    assert by_hand.gauge(counted, model="glm", version="1") == 0
    assert all(by_hand.gauge("tritongate_engine_kv_blocks", version=version) > 0 for version in "12")
