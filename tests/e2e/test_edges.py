"""What a gateway says at its bounds and of its keys, in front of the real Triton, by plain HTTP."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.relay import Relay
from tests.e2e.serve_process import ServeProcess
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess, slowed, wait_until

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
KEYS = {
    "client": "sk-client-0123456789",
    "operator": "sk-operator-0123456789",
    "limited": "sk-limited-67d1c2",
}
WRONG = [
    "sk-client-012345678",
    "sk-client-01234567890",
    "Sk-client-0123456789",
    "sk-",
    "x" * 4096,
    "schlüssel-0123456789",
]
BODY_LIMIT = 20_000
BODY_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
PING_S = 0.1
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TOKENS = 24
LONG: dict[str, Any] = {
    "model": "chatglm3",
    "messages": [{"role": "user", "content": "你好"}],
    "stream": True,
    "max_tokens": 8000,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def narrow(relay: Relay) -> Iterator[ServeProcess]:
    """A gateway with keys and little room, which can be kept from hearing of its Triton."""
    keys: list[dict[str, object]] = [{"name": "client", "key": KEYS["client"]}]
    keys += [{"name": "operator", "key": KEYS["operator"], "scopes": ["admin"]}]
    keys += [{"name": "limited", "key": KEYS["limited"], "requests_per_minute": 1}]
    settings = {
        "api_keys": json.dumps(keys),
        "models": "chatglm3",
        "max_body_bytes": BODY_LIMIT,
        "body_timeout_s": BODY_TIMEOUT_S,
        "ping_interval_s": PING_S,
        "max_in_flight": 1,
        "max_waiting": 1,
        "default_max_tokens": TOKENS,
    }
    variables = {f"TRITONGATE_{name.upper()}": str(value) for name, value in settings.items()}
    with ServeProcess(relay.address, log_level="info", **variables) as process:
        yield process


@pytest.fixture
def http(narrow: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow.base_url, headers=bearer(KEYS["client"]), timeout=60) as client:
        yield client


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


def lines_of(process: ServeProcess, request_id: str) -> list[dict[str, Any]]:
    logged = [json.loads(line) for line in process.output.splitlines() if line.startswith("{")]
    return [line for line in logged if line.get("request_id") == request_id]


def test_a_key_over_its_limit_is_told_when_to_come_again(narrow: ServeProcess, http: httpx.Client) -> None:
    body = {"model": "chatglm3", "messages": [{"role": "user", "content": "你好"}], "max_tokens": 1}
    limited = bearer(KEYS["limited"])
    assert http.post(CHAT, json=body, headers=limited).status_code == 200
    refused = http.post(CHAT, json=body, headers=limited)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert http.post(CHAT, json=body).status_code == 200, "another key's requests are not its own"


@pytest.mark.parametrize(
    "origin", [{}, {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}]
)
def test_options_and_health_need_no_key(origin: dict[str, str], narrow: ServeProcess) -> None:
    with httpx.Client(base_url=narrow.base_url, headers=origin, timeout=60) as anyone:
        for path, allowed in ((CHAT, "POST"), ("/v1/completions", "POST"), ("/v1/models", "GET")):
            answer = anyone.options(path)
            assert answer.status_code not in {401, 403}
            assert allowed in answer.headers["allow"].split(", ")
            assert "access-control-allow-origin" not in answer.headers, "pages elsewhere may not ask"
        for path in ("/health", "/health/ready", "/metrics", "/version"):
            assert anyone.get(path).status_code == 200
        assert anyone.get("/v1/models").status_code == 401


def test_wrong_keys_are_all_alike_and_no_key_is_told_or_logged(narrow: ServeProcess) -> None:
    said = set()
    with httpx.Client(base_url=narrow.base_url, timeout=60) as anyone:
        for key in WRONG:
            answer = anyone.post(CHAT, json={**LONG, "stream": False}, headers=bearer(key))
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            said.add(answer.content)
        unfit = anyone.post(CHAT, json=LONG, headers=bearer(KEYS["operator"]))
        assert unfit.status_code == 403
        right = {**LONG, "stream": False, "max_tokens": 1}
        marked = {**bearer(KEYS["client"]), "X-Request-Id": "by-its-owner"}
        assert anyone.post(CHAT, json=right, headers=marked).status_code == 200
    assert len(said) == 1
    wait_until(lambda: lines_of(narrow, "by-its-owner"))
    assert lines_of(narrow, "by-its-owner")[-1]["key"] == "client"
    told = narrow.output + unfit.text + "".join(each.decode() for each in said)
    for key in (*KEYS.values(), *WRONG):
        assert key == "sk-" or key not in told


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(BODY_LIMIT, 200), (BODY_LIMIT + 1, 413)])
def test_a_body_at_the_limit_passes_and_none_over_it(
    size: int, status: int, chunked: bool, http: httpx.Client
) -> None:
    asked = {"model": "chatglm3", "messages": LONG["messages"], "max_tokens": 1, "user": ""}
    asked["user"] = "u" * (size - len(json.dumps(asked)))
    body = json.dumps(asked).encode()
    assert len(body) == size
    content: Any = iter([body[:7000], body[7000:]]) if chunked else body
    answer = http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    if status == 413:
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert str(BODY_LIMIT) in answer.json()["error"]["message"]
    else:
        assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_body_that_comes_too_slowly_is_given_up(narrow: ServeProcess) -> None:
    with begun_post(narrow, 99) as connection:
        answer = connection.recv(65536)
    assert b" 408 " in answer.partition(b"\r\n")[0]


@contextlib.contextmanager
def begun_post(gateway: ServeProcess, length: int) -> Iterator[socket.socket]:
    """A connection on which a chat's head was sent and read, and nothing of its body."""
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.settimeout(30)
        head = [
            f"POST {CHAT} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Connection: close",
        ]
        head += ["Expect: 100-continue"]
        head += [f"Authorization: Bearer {KEYS['client']}", f"Content-Length: {length}", "", ""]
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        yield connection


def test_pings_keep_a_stream_open_while_nothing_comes(relay: Relay, http: httpx.Client) -> None:
    asked = {**LONG, "max_tokens": 200, "temperature": 0}
    whole = http.post(CHAT, json={**asked, "stream": False}).json()["choices"][0]["message"]["content"]
    with http.stream("POST", CHAT, json=asked) as answer:
        events = answer.iter_lines()
        received = [next(events)]
        with relay.held():
            pings = 0
            for line in events:
                received.append(line)
                pings = pings + 1 if line.startswith(":") else 0 if line else pings
                if pings == 4:
                    break
        received += events
    data = [line.removeprefix("data: ") for line in received if line.startswith("data: ")]
    assert all(not line or line.startswith((":", "data: ")) for line in received)
    assert data.pop() == "[DONE]"
    said = [json.loads(each)["choices"][0]["delta"].get("content") or "" for each in data]
    assert "".join(said) == whole


def test_a_gateway_that_is_full_says_so_and_sends_nothing_that_is_late(
    patient: UpProcess, hurried: ServeProcess, relay: Relay
) -> None:
    """The deadline of who waits is first: its head came before the request that has the one place."""
    wait_until(lambda: patient.gauge("tritongate_engine_requests_running", model="chatglm3") == 0)
    patient.wait_counted("chatglm3")
    begun = engine_requests(patient)
    late = {"model": "chatglm3", "messages": LONG["messages"], "max_tokens": 1}
    body = json.dumps(late).encode()
    with begun_post(hurried, len(body)) as waiting, contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=hurried.base_url, timeout=60))
        stream = stack.enter_context(http.stream("POST", CHAT, json=LONG))
        events = stream.iter_lines()
        next(events)
        # Nobody hears of what it does; at full speed it might even be through before the deadline.
        stack.enter_context(slowed(patient.stub("chatglm3")))
        stack.enter_context(relay.held())
        waiting.sendall(body)
        wait_until(lambda: hurried.gauge("tritongate_requests_waiting") == 1)
        full = http.post(CHAT, json=late)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(full.headers["retry-after"]) >= 1
        answer = b"".join(iter(lambda: waiting.recv(65536), b""))
        assert b" 504 " in answer.partition(b"\r\n")[0]
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "deadline_exceeded"
        # Then that of who is served passes, behind its first bytes.
        data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        error = json.loads(data[-1])["error"]
        assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "deadline_exceeded")
    assert hurried.gauge("tritongate_requests_rejected_total", reason="deadline") == 1
    wait_until(lambda: engine_requests(patient) == begun + 1)
    wait_until(hurried.is_ready)  # its Triton was silent for so long that it was held for gone
    assert httpx.post(hurried.base_url + CHAT, json=late, timeout=60).status_code == 200
    wait_until(lambda: engine_requests(patient) == begun + 2)


@pytest.fixture
def hurried(relay: Relay) -> Iterator[ServeProcess]:
    """A gateway with little room and little time, which bears its Triton's silence for longer than that."""
    settings: dict[str, object] = {"request_timeout_s": REQUEST_TIMEOUT_S, "idle_timeout_s": 60}
    settings |= {"max_in_flight": 1, "max_waiting": 1, "models": "chatglm3"}
    variables = {f"TRITONGATE_{name.upper()}": str(value) for name, value in settings.items()}
    with ServeProcess(relay.address, **variables) as process:
        yield process


def engine_requests(up: UpProcess) -> float:
    """Return how many requests the engine has ended, however."""
    return up.gauge("tritongate_engine_requests_total", model="chatglm3")


UNBOUNDED = {"model": "chatglm3", "messages": LONG["messages"], "ignore_eos": True}


def test_who_gives_no_bound_gets_the_settings(narrow: ServeProcess, http: httpx.Client) -> None:
    wait_until(narrow.is_ready)  # another test may just have kept its Triton from it
    bounded = http.post(CHAT, json=UNBOUNDED).json()
    assert bounded["usage"]["completion_tokens"] == TOKENS
    assert bounded["choices"][0]["finish_reason"] == "length"


def test_who_gives_no_bound_gets_else_the_rest_of_the_context(up: UpProcess) -> None:
    count = httpx.post(
        up.base_url + "/tokenize", json={"model": "chatglm3", "prompt": "a"}, timeout=60
    ).json()
    free = httpx.post(up.base_url + CHAT, json=UNBOUNDED, timeout=60).json()
    assert free["usage"]["total_tokens"] == count["max_model_len"] > 100


def test_a_client_that_leaves_is_a_499_in_metrics_and_in_the_log_alone(
    narrow: ServeProcess, http: httpx.Client
) -> None:
    before = narrow.gauge("tritongate_requests_total", status="499")
    with http.stream("POST", CHAT, json=LONG, headers={"X-Request-Id": "leaves-early"}) as answer:
        next(answer.iter_lines())
        assert answer.status_code == 200
    wait_until(lambda: narrow.gauge("tritongate_requests_total", status="499") == before + 1)
    wait_until(lambda: lines_of(narrow, "leaves-early"))
    assert lines_of(narrow, "leaves-early")[-1]["status"] == 499


def test_a_requests_id_is_echoed_and_logged_and_nobody_else_ends_it_by_that(
    narrow: ServeProcess, http: httpx.Client, patient: UpProcess
) -> None:
    with http.stream("POST", CHAT, json=LONG, headers={"X-Request-Id": "mine-7"}) as answer:
        events = answer.iter_lines()
        next(events)
        assert answer.headers["X-Request-Id"] == "mine-7"
        with contextlib.closing(StreamClient(patient.triton_grpc)) as triton:
            assert not any(meta.cancelled for _, meta in triton.stream("chatglm3", cancel="mine-7"))
        assert any(line.startswith("data: ") for line in events)
    wait_until(lambda: lines_of(narrow, "mine-7"))
    for unfit in ("x" * 200, "two words", "ümlaut"):
        made = http.get("/v1/models", headers={"X-Request-Id": unfit.encode()}).headers["X-Request-Id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
