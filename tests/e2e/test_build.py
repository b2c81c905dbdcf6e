"""What `tritongate build` wrote, moved elsewhere, on a tritonserver of anybody's."""

import httpx
import pytest

from tests.e2e.stock_server import StockServer
from tests.e2e.stream_client import StreamClient
from tests.e2e.test_golden import ask, check, golden

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_built_repository_answers_as_the_checkpoint_does(stock: StockServer) -> None:
    config = httpx.get(f"http://{stock.http}/v2/models/built/config", timeout=60).json()
    assert config["parameters"]["checkpoint"] == {"string_value": "checkpoint"}
    client = StreamClient(stock.grpc)
    case = golden("chatglm3")["cases"][0]
    check(ask(client, "built", case), case)
    client.close()
