"""The tokenizer entry's queue: its bound, its order, and who is answered without being tokenised."""

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.triton_models.serving.fakes import TIMEOUT_S, wait_until
from triton_models.serving import tokenizer_service
from triton_models.serving.chat_text import ChatText
from triton_models.serving.tokenizer_service import TokenizerService
from triton_models.serving.tokenizing import Tokenized
from wire.refusal import RefusalCode
from wire.tokenizing import Tokenizing, encode_tokenizing

HELLO = encode_tokenizing(Tokenizing(text="hello"))


class Client:
    """A request's responder; `on_send` runs before its answer, on the service's thread."""

    def __init__(self, on_send: Callable[[], object] = lambda: None, *, gone: bool = False) -> None:
        self.done: Tokenized | None = None
        self.refusal: tuple[RefusalCode, str] | None = None
        self.asked = False
        self._on_send = on_send
        self._gone = gone
        self._answered = threading.Event()

    def send(self, done: Tokenized) -> None:
        assert not self._answered.is_set(), "answered twice"
        self._on_send()
        self.done = done
        self._answered.set()

    def refuse(self, code: RefusalCode, message: str) -> None:
        assert not self._answered.is_set(), "answered twice"
        self.refusal = (code, message)
        self._answered.set()

    def cancelled(self) -> bool:
        assert not self._answered.is_set(), "asking now crashes the server"
        self.asked = True
        return self._gone

    @property
    def answered(self) -> bool:
        return self._answered.is_set()

    def wait(self) -> "Client":
        assert self._answered.wait(TIMEOUT_S), "no answer"
        return self

    def code(self) -> RefusalCode:
        self.wait()
        assert self.refusal is not None
        return self.refusal[0]


class Held:
    """A request that keeps the service busy until it is let go."""

    def __init__(self, service: TokenizerService) -> None:
        self._begun, self._go = threading.Event(), threading.Event()
        self.client = Client(on_send=self._hold)
        service.handle(self.client, HELLO)
        assert self._begun.wait(TIMEOUT_S)

    def _hold(self) -> None:
        self._begun.set()
        assert self._go.wait(TIMEOUT_S)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def service(text: ChatText) -> Iterator[TokenizerService]:
    service = TokenizerService(text, text.tokenizer.size, max_waiting=3)
    service.start()
    yield service
    service.close()


def test_requests_are_answered_in_their_order(service: TokenizerService, text: ChatText) -> None:
    held = Held(service)
    order: list[int] = []
    clients = [Client(on_send=lambda number=number: order.append(number)) for number in range(3)]
    for client in clients:
        service.handle(client, HELLO)
    assert not any(client.answered for client in clients)
    held.let_go()
    for client in clients:
        assert client.wait().done == Tokenized(text.tokenizer.encode("hello"), "hello", None)
    assert order == [0, 1, 2]


def test_what_is_over_the_bound_is_refused_at_once(service: TokenizerService) -> None:
    held = Held(service)
    waiting = [Client() for _ in range(3)]
    for client in waiting:
        service.handle(client, HELLO)
    over = Client()
    service.handle(over, HELLO)
    assert over.answered
    # Clients of Triton's own queue know it by these words.
    assert over.refusal == (RefusalCode.QUEUE_FULL, "Exceeds maximum queue size: 3 requests wait")
    held.let_go()
    assert all(client.wait().done for client in waiting)
    after = Client()
    service.handle(after, HELLO)
    assert after.wait().done


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"{}",
        b'{"text": "a", "ids": []}',
        b'{"ids": [99999999]}',
        b'{"txt": ""}',
        b'{"text": "\xff"}',
    ],
)
def test_a_request_that_makes_no_sense_is_refused_alone(service: TokenizerService, document: bytes) -> None:
    broken, after = Client(), Client()
    service.handle(broken, document)
    service.handle(after, HELLO)
    assert broken.code() is RefusalCode.INVALID_REQUEST
    assert after.wait().done


def test_a_failure_is_not_told_and_ends_nothing(service: TokenizerService) -> None:
    def fail() -> None:
        raise OSError("a secret")

    failed, after = Client(on_send=fail), Client()
    service.handle(failed, HELLO)
    service.handle(after, HELLO)
    assert failed.code() is RefusalCode.INTERNAL
    assert failed.refusal == (RefusalCode.INTERNAL, "the request failed")
    assert after.wait().done


def test_who_left_or_whose_time_is_over_is_not_served(
    service: TokenizerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_service, "ASK_AFTER_S", 0.0)
    held = Held(service)
    gone, late, patient = Client(gone=True), Client(), Client()
    service.handle(gone, HELLO)
    service.handle(late, HELLO, 0.001)
    service.handle(patient, HELLO, 1000.0)
    threading.Event().wait(0.01)
    held.let_go()
    assert gone.code() is RefusalCode.CANCELLED
    assert late.code() is RefusalCode.DEADLINE_EXCEEDED
    assert patient.wait().done


def test_no_request_may_wait_longer_than_the_limit(
    service: TokenizerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_service, "LONGEST_WAIT_S", 0.001)
    held = Held(service)
    late = Client()
    service.handle(late, HELLO, 1000.0)
    threading.Event().wait(0.01)
    held.let_go()
    assert late.code() is RefusalCode.DEADLINE_EXCEEDED


def test_only_who_waited_is_asked_whether_it_left(
    service: TokenizerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_service, "ASK_AFTER_S", TIMEOUT_S)
    client = Client(gone=True)
    service.handle(client, HELLO)
    assert client.wait().done
    assert not client.asked


def test_all_are_answered_when_the_model_is_unloaded(text: ChatText) -> None:
    service = TokenizerService(text, text.tokenizer.size)
    service.start()
    held = Held(service)
    waiting = Client()
    service.handle(waiting, HELLO)
    closing = threading.Thread(target=service.close)
    closing.start()
    late: list[Client] = []

    def refused() -> bool:
        late.append(Client())
        service.handle(late[-1], HELLO)
        return late[-1].answered

    wait_until(refused)
    held.let_go()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert held.client.wait().done
    assert waiting.code() is RefusalCode.SHUTTING_DOWN
    assert {client.code() for client in late} == {RefusalCode.SHUTTING_DOWN}
