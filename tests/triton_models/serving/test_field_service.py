"""Entry M's service over a scripted stream entry."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.triton_models.serving.fakes import TIMEOUT_S, wait_until
from triton_models.errors import StreamRefusedError
from triton_models.serving import field_service
from triton_models.serving.exchange import FieldAnswer
from triton_models.serving.field_service import FieldService
from triton_models.serving.process import process_name
from triton_models.signatures import Contract
from wire.history import Turn
from wire.meta import Accepted, Meta, Segment
from wire.refusal import RefusalCode
from wire.sampling import Generation


def acceptance(process: str) -> Meta:
    return Meta(accepted=Accepted(request_id="r", prompt_tokens=1, process=process))


class FakeStream:
    """Answers with the prompt; "wait" until it is cancelled, "silent" not at all until `over` is set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[Turn], Generation]] = []
        self.cancels: list[str] = []
        self.lost_cancels = 0
        self.process = process_name()
        self.over = threading.Event()

    def give_up(self, silent_s: float) -> None:
        assert silent_s > 0

    def generate(
        self, prompt: str, history: Sequence[Turn], generation: Generation
    ) -> Iterator[tuple[str, Meta]]:
        process = self.process
        self.asked.append((prompt, history, generation))
        if prompt == "refused":
            raise StreamRefusedError(RefusalCode.QUEUE_FULL, "it is full")
        if prompt == "broken":
            raise OSError("a secret")
        if prompt == "silent":
            self.over.wait(TIMEOUT_S)
        yield "", acceptance(process)
        while prompt == "wait" and not self.over.wait(0.01):
            if generation.request_id in self.cancels:
                raise StreamRefusedError(RefusalCode.CANCELLED, "cancelled")
        if prompt == "cut short":
            return
        yield f"\nre {prompt}", Meta(tokens=1)
        yield "\nmore", Meta(segments=[Segment(0, "assistant")], finish_reason="stop")

    def cancel(self, request_id: str) -> None:
        if self.lost_cancels:
            self.lost_cancels -= 1
            raise StreamRefusedError(RefusalCode.UNAVAILABLE, "gone")
        self.cancels.append(request_id)


class Client:
    """A request's responder."""

    def __init__(self) -> None:
        self.answers: Sequence[FieldAnswer] | None = None
        self.refusal: tuple[RefusalCode, str] | None = None
        self.gone = False
        self._answered = threading.Event()

    def send(self, answers: Sequence[FieldAnswer]) -> None:
        assert not self._answered.is_set(), "answered twice"
        self.answers = answers
        self._answered.set()

    def refuse(self, code: RefusalCode, message: str) -> None:
        assert not self._answered.is_set(), "answered twice"
        self.refusal = (code, message)
        self._answered.set()

    def cancelled(self) -> bool:
        assert not self._answered.is_set(), "asking now crashes the server"
        return self.gone

    def wait(self) -> "Client":
        assert self._answered.wait(TIMEOUT_S), "no answer"
        return self


class Field:
    def __init__(self, **settings: Any) -> None:
        self.stream = FakeStream()
        self.service = FieldService(Contract.BATCHED, "chatglm3", self.stream, **settings)
        self.service.start()

    def ask(self, *prompts: str, **changes: bytes) -> Client:
        client = Client()
        rows = [
            {
                name: [value]
                for name, value in {
                    "prompt": prompt.encode(),
                    "history": b"",
                    "temperature": b"0.5",
                    "max_token": b"99",
                    **changes,
                }.items()
            }
            for prompt in prompts
        ]
        self.service.handle(client, rows)
        return client


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Field]]:
    monkeypatch.setattr(field_service, "MONITOR_INTERVAL_S", 0.01)
    fields: list[Field] = []

    def make(**settings: Any) -> Field:
        fields.append(Field(**settings))
        return fields[-1]

    yield make
    for each in fields:
        each.stream.over.set()
        each.service.close()


@pytest.fixture
def field(start: Callable[..., Field]) -> Field:
    return start()


def test_a_question_and_its_answer(field: Field) -> None:
    client = field.ask("hi", history=b"[['q', 'a']]").wait()
    (answer,) = client.answers
    assert answer.response == "re hi\nmore"
    assert [(turn.role, turn.content) for turn in answer.history.turns] == [
        ("user", "q"),
        ("assistant", "a"),
        ("user", "hi"),
        ("assistant", "re hi\nmore"),
    ]
    ((prompt, history, generation),) = field.stream.asked
    assert (prompt, len(history)) == ("hi", 2)
    assert (generation.temperature, generation.max_total_tokens) == (0.5, 99)
    assert (generation.stream, generation.quiet) == (False, True)
    assert generation.max_tokens is None
    assert generation.request_id


def test_rows_are_answered_together_in_their_order_and_have_ids_of_their_own(field: Field) -> None:
    client = field.ask("a", "b", "c").wait()
    assert [answer.response for answer in client.answers] == ["re a\nmore", "re b\nmore", "re c\nmore"]
    assert len({generation.request_id for _, _, generation in field.stream.asked}) == 3


def test_the_first_row_that_fails_ends_the_request_and_the_others(field: Field) -> None:
    client = field.ask("wait", "refused").wait()
    assert client.refusal == (RefusalCode.QUEUE_FULL, "row 1: it is full")
    wait_until(lambda: not field.service._calls)
    assert len(field.stream.cancels) == 1


@pytest.mark.parametrize(
    ("prompt", "changes", "refusal"),
    [
        ("refused", {}, (RefusalCode.QUEUE_FULL, "it is full")),
        ("broken", {}, (RefusalCode.INTERNAL, "the request failed")),
        ("cut short", {}, (RefusalCode.UNAVAILABLE, "the answer ended before it was complete")),
        ("x", {"max_token": b"0"}, (RefusalCode.INVALID_REQUEST, "max_token")),
        ("x", {"history": b"("}, (RefusalCode.INVALID_REQUEST, "history")),
    ],
)
def test_refusals(
    field: Field, prompt: str, changes: dict[str, bytes], refusal: tuple[RefusalCode, str]
) -> None:
    code, message = field.ask(prompt, **changes).wait().refusal
    assert code is refusal[0]
    assert message.startswith(refusal[1])
    assert field.ask("fine").wait().answers


def test_a_client_that_left_frees_the_engine_even_if_cancels_get_lost(field: Field) -> None:
    field.stream.lost_cancels = 2
    client = field.ask("wait")
    wait_until(lambda: len(field.stream.asked) == 1)
    client.gone = True
    assert client.wait().refusal[0] is RefusalCode.CANCELLED
    wait_until(lambda: not field.service._calls)
    assert set(field.stream.cancels) == {field.stream.asked[0][2].request_id}


def test_a_stream_entry_that_does_not_accept_is_given_up(field: Field) -> None:
    accepted = field.ask("wait")
    wait_until(lambda: [call.process for call in field.service._calls.values()] == [field.stream.process])
    field.service._accept_timeout_s = 0.3
    code, message = field.ask("silent").wait().refusal
    assert code is RefusalCode.UNAVAILABLE
    assert "in time" in message
    wait_until(lambda: len(field.service._calls) == 1)
    accepted.gone = True
    assert accepted.wait().refusal[0] is RefusalCode.CANCELLED


def test_rows_end_with_the_process_that_has_accepted_them(field: Field) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        field.stream.process = process_name(process.pid)
        its_own = field.ask("wait", "wait")
        wait_until(lambda: len(field.stream.asked) == 2)
        field.stream.process = process_name()
        of_another = field.ask("wait")
        wait_until(lambda: len(field.stream.asked) == 3)
        process.kill()  # a zombie, like a stub that Triton has not waited for yet
        code, message = its_own.wait().refusal
        assert code is RefusalCode.UNAVAILABLE
        assert "process has ended" in message
    wait_until(lambda: len(field.service._calls) == 1)
    of_another.gone = True
    assert of_another.wait().refusal[0] is RefusalCode.CANCELLED


def test_hundreds_are_open_at_once_and_more_are_refused(start: Callable[..., Field]) -> None:
    field = start(max_open=256)
    clients = [field.ask("wait") for _ in range(256)]
    assert field.ask("x").wait().refusal[0] is RefusalCode.QUEUE_FULL
    wait_until(lambda: len(field.stream.asked) == 256)
    for client in clients:
        client.gone = True
    for client in clients:
        client.wait()
    wait_until(lambda: not field.service._calls)


def test_closing_answers_what_is_open(field: Field) -> None:
    client = field.ask("silent")
    field.service.close()
    assert client.wait().refusal[0] is RefusalCode.SHUTTING_DOWN
    assert field.ask("x").wait().refusal[0] is RefusalCode.SHUTTING_DOWN
