"""Legacy clients in numbers."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.e2e.field_client import ask_batched, conversation
from tests.e2e.up_process import UpProcess, wait_until
from tests.gateway.kserve.legacy import question

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "chatglm3"
HELLO = "你好"
MANY = 256
LONG, PATIENCE_S = "8000", 2.0
"""So many tokens take longer than this, and the engine has begun with them by then."""


def idle(up: UpProcess) -> bool:
    names = ("requests_running", "requests_waiting", "kv_blocks_used")
    return all(up.gauge(f"tritongate_engine_{name}", model=MODEL) == 0 for name in names)


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
def test_a_client_that_gives_up_frees_the_engine(patient: UpProcess, protocol: str) -> None:
    """Greedily, the answer to this prompt does not end by itself."""

    def given_up() -> float:
        # A gRPC client's deadline is the engine's, too, which may be the first to end the answer by it.
        name = "tritongate_engine_requests_total"
        ends = ("cancelled", "deadline")
        return sum(patient.gauge(name, model=MODEL, finish_reason=reason) for reason in ends)

    before = given_up()
    if protocol == "http":
        with pytest.raises(httpx.ReadTimeout):
            ask_batched(patient.kserve_http, HELLO, max_token=LONG, timeout_s=PATIENCE_S)
    else:
        asked = question(MODEL, temperature="0", max_token=LONG)
        with grpc.insecure_channel(patient.kserve_grpc) as channel, pytest.raises(grpc.RpcError) as late:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(asked, timeout=PATIENCE_S)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: idle(patient) and given_up() > before)
