from collections.abc import Iterator
from typing import Any

import pytest

from tests.triton_models.serving.fakes import PB_UTILS, wait_until
from tests.triton_models.vllm.fakes import FakeEngine, Sender
from triton_models.serving.outbox import Responder
from triton_models.vllm.service import Arrival, Call, Service

STREAM = {"stream": [True]}


def call(sender: Sender) -> Call:
    return Call("request", Responder(sender, PB_UTILS))


class Served:
    def __init__(self) -> None:
        self.deaths = 0
        self.service = Service(self._start, self._died)

    def _start(self) -> Any:
        self.engine = FakeEngine()
        return self.engine

    def _died(self) -> None:
        self.deaths += 1

    def ask(self, *prompts: str, sender: Sender | None = None, **values: list[Any]) -> list[Sender]:
        senders = [sender or Sender() for _ in prompts]
        arrivals = [
            Arrival(call(sender), {"text_input": [prompt.encode()]} | values)
            for sender, prompt in zip(senders, prompts, strict=True)
        ]
        self.service.submit(arrivals)
        return senders

    def die(self) -> None:
        self.engine.dead = True
        self.service._loop.call_soon_threadsafe(self.engine.death.set)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.service.close()


def test_a_stream_has_a_response_for_each_output_and_one_end(served: Served) -> None:
    (sender,) = served.ask("three", **STREAM, return_finish_reason=[True], return_num_output_tokens=[True])
    assert sender.wait().text == b"abc"
    assert [response["finish_reason"] for response in sender.responses] == [[b"None"], [b"None"], [b"stop"]]
    assert [response["num_output_tokens"] for response in sender.responses] == [[1], [1], [1]]


def test_an_answer_that_does_not_stream_begins_with_its_prompt(served: Served) -> None:
    (whole,) = served.ask("three")
    (bare,) = served.ask("three", exclude_input_in_output=[True])
    assert (whole.wait().text, bare.wait().text) == (b"threeabc", b"abc")


def test_a_bad_request_fails_alone(served: Served) -> None:
    good, bad, broken, again = served.ask("three", "bad", "broken", "three", **STREAM)
    assert bad.wait().error.code == "INVALID_ARG"
    assert bad.error.message == "tritongate:invalid_request: temperature is too hot"
    assert broken.wait().error.code == "INTERNAL"
    assert "secret" not in broken.error.message
    assert good.wait().text == again.wait().text == b"abc"


@pytest.mark.parametrize("prompt", ["error", "unfinished"])
def test_an_answer_that_the_engine_does_not_end_is_an_error(served: Served, prompt: str) -> None:
    (sender,) = served.ask(prompt, **STREAM)
    assert sender.wait().error.code == "INTERNAL"


def test_a_request_that_cannot_be_read_is_refused(served: Served) -> None:
    sender, empty = Sender(), Sender()
    served.service.submit([Arrival(call(sender), None), Arrival(call(empty), {"text_input": []})])
    assert sender.wait().error.code == empty.wait().error.code == "INVALID_ARG"


@pytest.mark.parametrize("values", [{}, STREAM])
def test_a_client_that_leaves_aborts_in_the_engine(served: Served, values: dict[str, Any]) -> None:
    (sender,) = served.ask("wait", **values)
    assert served.engine.running.acquire(timeout=30)
    assert not served.engine.aborted
    sender.gone = True
    assert sender.wait().error.code == "CANCELLED"
    assert served.engine.aborted == ["wait"]


def test_a_client_that_has_left_at_once_is_answered_too(served: Served) -> None:
    """Cancelled before it begins, a task would not answer."""
    (sender,) = served.ask("wait", sender=Sender(gone=True))
    assert sender.wait().error.code == "CANCELLED"


def test_a_dead_engine_ends_every_request_and_is_told_once(served: Served) -> None:
    senders = served.ask("wait", "wait", **STREAM)
    for _ in senders:
        assert served.engine.running.acquire(timeout=30)
    served.die()
    (late,) = served.ask("three")
    for sender in (*senders, late):
        assert sender.wait().error.code == "UNAVAILABLE"
        assert sender.error.message.startswith("tritongate:unavailable: ")
    assert served.deaths == 1


def test_closing_answers_what_is_open_and_ends_the_engine() -> None:
    served = Served()
    (running,) = served.ask("wait", **STREAM)
    assert served.engine.running.acquire(timeout=30)
    (fresh,) = served.ask("wait")
    served.service.close()
    assert served.engine.closed
    for sender in (running, fresh):
        assert sender.ended.is_set()
        assert "unloaded" in sender.error.message
    assert not served.service._thread.is_alive()
    assert not served.service._sender.worker._thread.is_alive()


def test_a_response_that_cannot_be_sent_ends_its_request_alone(served: Served) -> None:
    (faulty,) = served.ask("three", sender=Sender(fails=True), **STREAM)
    (good,) = served.ask("three", **STREAM)
    assert faulty.wait().error.code == "INTERNAL"
    wait_until(lambda: served.engine.aborted == ["three"])
    assert good.wait().text == b"abc"


def test_nothing_is_asked_about_once_it_has_ended(served: Served) -> None:
    (waiting,) = served.ask("wait")
    served.ask(*["three"] * 50, **STREAM)
    wait_until(lambda: waiting.asked > 1)  # the senders themselves fail where they are asked too late
    served.die()
    waiting.wait()


def test_an_engine_that_does_not_start_fails_the_load() -> None:
    def start() -> Any:
        raise RuntimeError("no such checkpoint")

    with pytest.raises(RuntimeError, match="no such checkpoint"):
        Service(start, lambda: None)


def test_an_embedding(served: Served) -> None:
    sender = Sender()
    values = {"embedding_request": [b'{"input": "four"}'], "return_num_input_tokens": [True]}
    served.service.submit([Arrival(call(sender), values)])
    assert sender.wait().responses == [{"text_output": [b"[0.5, 1.0]"], "num_input_tokens": [4]}]
