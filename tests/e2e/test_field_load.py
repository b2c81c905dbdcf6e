"""The field's entry under load, and when what is behind it breaks."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.field_client import FieldError, ask_batched, ask_chatglm2, conversation
from tests.e2e.up_process import ABORTED, UpProcess, lives, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HELLO = "你好"
MANY = 256
LONG = "512"
GIVE_UP, PATIENCE_S = 96, 3.0
"""So many long answers take longer than this, and the engine has begun with them by then."""
CLEAR_WITHIN_S = 60.0
RECOVER_WITHIN_S = 60.0
CUT = "cut"
"""The server ended the connection without an answer, or was not there."""


def idle(up: UpProcess, model: str = "chatglm3") -> bool:
    names = ("requests_running", "requests_waiting", "kv_blocks_used")
    return all(up.gauge(f"tritongate_engine_{name}", model=model) == 0 for name in names)


def test_hundreds_are_in_flight_and_memory_does_not_grow(up: UpProcess) -> None:
    stub = psutil.Process(up.stub("chatglm3").pid)

    def ask_many() -> int:
        def ask(number: int) -> bool:
            response, history = ask_batched(up.triton_http, f"{number}", temperature="1", max_token="30")
            return conversation(history) == [("user", f"{number}"), ("assistant", response)]

        with ThreadPoolExecutor(MANY) as threads:
            futures = [threads.submit(ask, number) for number in range(MANY)]
            wait_until(lambda: stub.num_threads() > MANY // 2 or all(each.done() for each in futures))
            assert all(each.result() for each in futures)
        # The stack of each thread is memory, too, and how many there are at once is a matter of chance.
        wait_until(lambda: stub.num_threads() < MANY // 2)
        return int(stub.memory_info().rss)

    ask_many()  # whatever is allocated once
    before = ask_many()
    after = max(ask_many() for _ in range(2))
    assert after - before < 8 * 2**20
    wait_until(lambda: idle(up))


def test_a_client_that_gives_up_frees_the_engine(up: UpProcess) -> None:
    """Over gRPC: Triton's HTTP server does not notice that the client of an inference hung up."""

    def cancelled() -> float:
        return up.gauge("tritongate_engine_requests_total", model="chatglm2", finish_reason="cancelled")

    def give_up(_: int) -> None:
        with (
            contextlib.suppress(InferenceServerException),
            grpcclient.InferenceServerClient(up.triton_grpc) as client,
        ):
            ask_chatglm2(client, HELLO, [], temperature="1.5", max_token=LONG, timeout_s=PATIENCE_S)

    before = cancelled()
    with ThreadPoolExecutor(GIVE_UP) as threads:
        list(threads.map(give_up, range(GIVE_UP)))
    wait_until(lambda: idle(up, "chatglm2") and cancelled() > before)


def answers(up: UpProcess) -> bool:
    try:
        return bool(ask_batched(up.triton_http, HELLO, timeout_s=30))
    except (FieldError, httpx.TransportError):
        return False


def test_what_is_behind_it_may_go_and_come_back(own_up: UpProcess) -> None:
    control = own_up.triton_http + "/v2/repository/models/chatglm3-stream"
    assert httpx.post(control + "/unload", timeout=30).status_code == 200
    wait_until(lambda: not own_up.stubs("chatglm3-stream"))
    asked = time.monotonic()
    with pytest.raises(FieldError, match="chatglm3-stream is not loaded") as raised:
        ask_batched(own_up.triton_http, HELLO)
    assert raised.value.status == 503
    assert time.monotonic() - asked < CLEAR_WITHIN_S
    assert httpx.post(control + "/load", timeout=60).status_code == 200
    assert answers(own_up)

    # What was running in a process that died, Triton never answers: then the client's own patience decides.
    # Nobody's connection is cut, unless Triton dies of it, too.
    for victim, patience_s in (("chatglm3-stream", CLEAR_WITHIN_S), ("chatglm3", 5.0)):
        with ThreadPoolExecutor(80) as threads:
            asking = [threads.submit(fault_of, own_up, patience_s) for _ in range(80)]
            wait_until(lambda: own_up.gauge("tritongate_engine_requests_running", model="chatglm3") > 0)
            server, said = own_up.server(), len(own_up.output)
            own_up.stub(victim).kill()
            faults = {each.result(CLEAR_WITHIN_S) for each in asking}
        if CUT in faults:
            wait_until(lambda seen=said: f"Triton is down ({ABORTED})" in own_up.output[seen:])
            assert not lives(server)
        else:
            assert any("503" in fault for fault in faults if fault) or "ReadTimeout" in faults
        if victim == "chatglm3-stream":
            assert "ReadTimeout" not in faults
            assert CUT in faults or any("process has ended" in fault for fault in faults if fault)
        wait_until(lambda: answers(own_up), RECOVER_WITHIN_S)
        wait_until(lambda: idle(own_up))
    assert own_up.stop() == 0


def fault_of(up: UpProcess, patience_s: float) -> str | None:
    """Ask a long question; return what kind of end it had, None for an answer."""
    try:
        ask_batched(up.triton_http, HELLO, temperature="1", max_token=LONG, timeout_s=patience_s)
    except FieldError as error:
        return f"{error.status} {error}"
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return CUT
    except httpx.TransportError as error:
        return type(error).__name__
    return None
