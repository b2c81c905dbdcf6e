from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from bench.gpu.faulty_clients import Clients

CHUNK = b'data: {"choices": [{"text": "a"}]}\n\n'
ERROR = b'data: {"error": {"message": "the engine failed"}}\n\n'
DONE = b"data: [DONE]\n\n"


class Answer(BaseHTTPRequestHandler):
    status = 200
    body = b""
    asked: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def clients() -> Iterator[Clients]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield Clients(url, requests=2, prompt=3, out=4, deadline_s=60)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "end", "ok"),
    [
        (CHUNK + DONE, "200", True),
        (CHUNK + ERROR + DONE, "error in the stream", True),
        (CHUNK, "cut off", False),
    ],
)
def test_the_end_of_a_stream_is_told(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, body: bytes, end: str, *, ok: bool
) -> None:
    monkeypatch.setattr(Answer, "body", body)
    flood = clients.flood(when_started=lambda: None)
    assert flood.ends == Counter({end: 1}) + Counter({"200": 1})
    assert flood.verdict()["ok"] == ok


def test_a_status_is_an_answer(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "status", 502)
    assert clients.ask(seed=9) == "502"
    assert b'"seed": 9' in Answer.asked[-1]
