"""An entry written by hand: a checkpoint is all that it must name. And several versions of one."""

import httpx
import pytest

from tests.e2e.stock_server import StockServer
from tests.e2e.stream_client import StreamClient, infer_request
from tests.e2e.up_process import wait_until
from wire.meta import decode_meta
from wire.strings import unpack_strings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_what_the_configuration_leaves_out_is_filled_in(stock: StockServer) -> None:
    config = httpx.get(f"http://{stock.http}/v2/models/glm/config", timeout=60).json()
    assert config["max_batch_size"] == 64
    batching = config["dynamic_batching"]
    assert not batching["priority_levels"]
    assert not batching["max_queue_delay_microseconds"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in config["input"]] == ["prompt", "history", "sampling"]
    assert [each["name"] for each in config["output"]] == ["response", "meta"]


def test_each_version_has_its_own_checkpoint_and_metrics(stock: StockServer) -> None:
    """Triton itself would let them overwrite each other's gauges."""
    client = StreamClient(stock.grpc)
    for version, chat_format in (("1", "chatglm3"), ("2", "chatglm2"), ("", "chatglm2")):
        probe = infer_request("glm", "", "", '{"probe":true}', version=version)
        answer = next(iter(client.send(probe)))
        meta = decode_meta(unpack_strings(answer.infer_response.raw_output_contents[1])[0])
        assert meta.probe.format == chat_format
    client.ask("glm", "你好", max_tokens=2)
    client.close()
    counted = "tritongate_engine_prompt_tokens_total"
    wait_until(lambda: stock.gauge(counted, model="glm", version="2") > 0)
    assert stock.gauge(counted, model="glm", version="1") == 0
    # Each is told by a process of its own, some time after its start.
    wait_until(
        lambda: all(
            stock.gauge("tritongate_engine_kv_blocks", model="glm", version=version) > 0 for version in "12"
        )
    )
