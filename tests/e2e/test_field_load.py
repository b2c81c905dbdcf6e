"""Legacy clients in numbers."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.field_client import ask_batched, ask_chatglm2, conversation
from tests.e2e.up_process import UpProcess, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HELLO = "你好"
MANY = 256
LONG = "512"
GIVE_UP, PATIENCE_S = 96, 3.0
"""So many long answers take longer than this, and the engine has begun with them by then."""


def idle(up: UpProcess, model: str = "chatglm3") -> bool:
    names = ("requests_running", "requests_waiting", "kv_blocks_used")
    return all(up.gauge(f"tritongate_engine_{name}", model=model) == 0 for name in names)


def test_hundreds_are_in_flight_and_memory_does_not_grow(up: UpProcess) -> None:
    process = psutil.Process(
        up.process.pid
    )  # an engine's memory still grows with the blocks that it first uses

    def ask_many() -> int:
        def ask(number: int) -> bool:
            response, history = ask_batched(up.kserve_http, f"{number}", temperature="1", max_token="30")
            return conversation(history) == [("user", f"{number}"), ("assistant", response)]

        with ThreadPoolExecutor(MANY) as threads:
            futures = [threads.submit(ask, number) for number in range(MANY)]
            assert all(each.result() for each in futures)
        wait_until(lambda: idle(up))
        return int(process.memory_info().rss)

    ask_many()  # whatever is allocated once
    before = ask_many()
    after = max(ask_many() for _ in range(2))
    assert after - before < 8 * 2**20


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_that_gives_up_frees_the_engine(up: UpProcess, protocol: str) -> None:
    def cancelled() -> float:
        return up.gauge("tritongate_engine_requests_total", model="chatglm2", finish_reason="cancelled")

    def give_up_over_grpc() -> None:
        with (
            contextlib.suppress(InferenceServerException),
            grpcclient.InferenceServerClient(up.kserve_grpc) as client,
        ):
            ask_chatglm2(client, HELLO, [], temperature="1.5", max_token=LONG, timeout_s=PATIENCE_S)

    def give_up_over_http() -> None:
        values = {"prompt": [HELLO], "history": [], "temperature": ["1.5"], "max_token": [LONG]}
        inputs = [
            {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": data}
            for name, data in (values | {"history_len": ["5"]}).items()
        ]
        url = f"{up.kserve_http}/v2/models/chatglm2/infer"
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(url, json={"inputs": inputs}, timeout=httpx.Timeout(60, read=PATIENCE_S))

    before = cancelled()
    with ThreadPoolExecutor(GIVE_UP) as threads:
        for _ in range(GIVE_UP):
            threads.submit(give_up_over_grpc if protocol == "grpc" else give_up_over_http)
    wait_until(lambda: idle(up, "chatglm2") and cancelled() > before)
