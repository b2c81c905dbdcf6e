"""The threads on the way in: their order, their bounds, and who is answered without the work being done."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import TIMEOUT_S, FakeResponder, wait_until
from triton_models.errors import InvalidGrammarError, QueueFullError
from triton_models.serving import service as module
from triton_models.serving.chat_text import ChatText
from triton_models.serving.intake import (
    COMPILERS,
    GRAMMARS_WAITING,
    Arrival,
    Inputs,
    Intake,
)
from triton_models.serving.request import OpenRequest
from triton_models.serving.service import TEXTS_WAITING
from wire.grammar import Grammar
from wire.refusal import RefusalCode
from wire.request import Generation, Tokenize, encode_request


class Owner:
    """Nobody: what is prepared here goes no further."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Preparing(Intake):
    """An intake whose arrivals are requests that were opened; `errors` are those of `begin`."""

    def __init__(self, compile_grammar: Any, prepare: Any) -> None:
        super().__init__(self._open, prepare, compile_grammar)
        self.errors: list[Exception] = []
        for worker in self.workers:
            worker.start()

    def prepare(self, *requests: OpenRequest) -> None:
        self.submit(requests)

    def _open(self, request: OpenRequest) -> None:
        try:
            self.begin(request)
        except QueueFullError as error:
            self.errors.append(error)


def opened(key: str, *, held: bool = False, pattern: str = "a", **more: Any) -> OpenRequest:
    grammar = Grammar("regex", pattern) if held else None
    inputs = Inputs(b"", b"", b"")
    return OpenRequest(key, Generation(grammar=grammar, **more), inputs, FakeResponder(), Owner())


class Compiler:
    """Notes whose grammars it is asked for, and takes until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def __call__(self, generation: Generation) -> None:
        assert generation.grammar is not None
        self.asked.append(generation.grammar.text)
        assert self.go.wait(20)


class PreparedMeanwhile(OpenRequest):
    """One whose grammar is taken by the thread that prepares it, as soon as somebody has looked at it."""

    _held: Any

    @property
    def compiling(self) -> Any:
        found, self._held = self._held, None
        return found

    @compiling.setter
    def compiling(self, value: Any) -> None:
        self._held = value


def test_a_request_may_be_prepared_while_it_is_given_up() -> None:
    request = PreparedMeanwhile("1", Generation(), Inputs(b"", b"", b""), FakeResponder(), Owner())
    compiling: Future[Any] = Future()
    request.compiling = compiling
    Intake(print, print, print).give_up(request)
    assert compiling.cancelled()


def test_nobody_waits_for_a_grammar_that_is_compiled() -> None:
    compiled = threading.Event()
    prepared: list[tuple[str, Any]] = []

    def compile_grammar(generation: Generation) -> None:
        assert compiled.wait(20)

    preparing = Preparing(compile_grammar, lambda request: prepared.append((request.key, request.compiling)))
    preparing.prepare(opened("held", held=True))
    preparing.prepare(opened("free"))
    wait_until(lambda: bool(prepared))
    assert prepared == [("free", None)]
    compiled.set()
    preparing.close()
    (_, (key, future)) = prepared
    assert key == "held"
    assert future is not None
    assert future.result() is None


def test_what_compiling_raises_is_told_where_the_request_is_prepared() -> None:
    errors: list[BaseException | None] = []

    def compile_grammar(generation: Generation) -> None:
        raise InvalidGrammarError("broken")

    preparing = Preparing(compile_grammar, lambda request: errors.append(request.compiling.exception()))
    preparing.prepare(opened("held", held=True))
    wait_until(lambda: bool(errors))
    preparing.close()
    (error,) = errors
    assert isinstance(error, InvalidGrammarError)


def test_nothing_is_compiled_for_who_gave_up() -> None:
    compiler, prepared = Compiler(), list[str]()
    preparing = Preparing(compiler, lambda request: prepared.append(request.key))
    for number in range(COMPILERS):
        preparing.prepare(opened(f"busy{number}", held=True, pattern="busy"))
    cancelled = opened("cancelled", held=True, pattern="cancelled")
    preparing.prepare(cancelled)
    preparing.prepare(opened("late", held=True, pattern="late", deadline_ms=1))
    preparing.prepare(opened("patient", held=True, pattern="patient"))
    cancelled.cancelled = True
    late = opened("sooner", deadline_ms=1)
    wait_until(lambda: late.given_up() is not None)
    compiler.go.set()
    wait_until(lambda: len(prepared) == COMPILERS + 3)
    preparing.close()
    assert sorted(compiler.asked) == ["busy"] * COMPILERS + ["patient"]


def test_who_gives_up_leaves_the_list_at_once() -> None:
    compiler, prepared = Compiler(), dict[str, Any]()
    preparing = Preparing(compiler, lambda request: prepared.update({request.key: request.compiling}))
    busy = [opened(f"busy{number}", held=True, pattern=f"busy{number}") for number in range(COMPILERS)]
    waiting = [
        opened(f"{number}", held=True, pattern=f"{number}") for number in range(GRAMMARS_WAITING - COMPILERS)
    ]
    for request in [*busy, *waiting]:
        preparing.prepare(request)
    wait_until(lambda: len(compiler.asked) == COMPILERS)
    for request in (waiting[-1], busy[0]):
        request.cancelled = True
        preparing.give_up(request)
    wait_until(lambda: list(prepared) == [waiting[-1].key])
    assert prepared[waiting[-1].key].cancelled()
    preparing.prepare(opened("more", held=True, pattern="more"))  # in its place
    wait_until(lambda: Grammar("regex", "more") in list(preparing._waiting))
    gone = opened("gone", held=True, pattern="more")
    gone.cancelled = True
    preparing.prepare(gone)
    wait_until(lambda: "gone" in prepared)
    preparing.give_up(opened("free"))
    compiler.go.set()
    preparing.close()
    assert len(prepared) == GRAMMARS_WAITING + 2
    assert waiting[-1].generation.grammar.text not in compiler.asked


def test_closing_waits_for_no_grammar_that_was_not_begun() -> None:
    compiler, prepared = Compiler(), list[str]()
    preparing = Preparing(compiler, lambda request: prepared.append(request.key))
    for number in range(COMPILERS + 9):
        preparing.prepare(opened(f"{number}", held=True, pattern=f"{number}"))
    wait_until(lambda: len(compiler.asked) == COMPILERS and len(preparing._waiting) == COMPILERS + 9)
    closing = threading.Thread(target=preparing.close)
    closing.start()
    wait_until(preparing._closing.is_set)
    compiler.go.set()
    closing.join(20)
    assert len(compiler.asked) == COMPILERS
    assert len(prepared) == COMPILERS + 9


def test_so_many_grammars_wait_and_any_number_of_requests_for_them() -> None:
    compiler, prepared = Compiler(), list[str]()
    preparing = Preparing(compiler, lambda request: prepared.append(request.key))
    for number in range(GRAMMARS_WAITING):
        preparing.prepare(opened("first", held=True, pattern=f"{number}"))
        preparing.prepare(opened("again", held=True, pattern=f"{number}"))
    preparing.prepare(opened("more", held=True, pattern="more"))
    wait_until(lambda: bool(preparing.errors))
    assert f"{GRAMMARS_WAITING} grammars" in str(preparing.errors[0])
    preparing.prepare(opened("free"))
    compiler.go.set()
    wait_until(lambda: len(prepared) == 2 * GRAMMARS_WAITING + 1)
    preparing.prepare(opened("more", held=True, pattern="more"))
    wait_until(lambda: "more" in prepared)
    preparing.close()


def test_a_fault_in_one_request_ends_nothing() -> None:
    prepared: list[str] = []

    def prepare(request: OpenRequest) -> None:
        prepared.append(request.key)
        if request.key == "broken":
            raise ZeroDivisionError

    preparing = Preparing(lambda _: None, prepare)
    for key in ("broken", "fine"):
        preparing.prepare(opened(key))
    preparing.close()
    assert prepared == ["broken", "fine"]


def test_probes_overtake_generations_that_wait(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_ids = ChatText.prompt_ids

    def slow(self: ChatText, *arguments: Any) -> list[int]:
        time.sleep(0.05)
        return prompt_ids(self, *arguments)

    monkeypatch.setattr(ChatText, "prompt_ids", slow)
    served = serve()
    answers = [served.ask(max_tokens=1) for _ in range(40)]
    served.probe()
    assert not answers[-1].ended.is_set()
    for answer in answers:
        answer.wait()


class Text:
    """What a client is told who has text tokenized."""

    def __init__(self, served: Served, text: str = "hello", responder: Any = None, **request: Any) -> None:
        document = encode_request(Tokenize(tokenize="text", **request))
        self.responder: FakeResponder = served.send(document, text, responder)

    @property
    def ids(self) -> list[int] | None:
        (meta,) = self.responder.wait().metas
        assert meta.tokenized is not None
        return meta.tokenized.ids

    @property
    def code(self) -> RefusalCode:
        self.responder.wait()
        assert self.responder.refusal is not None
        return self.responder.refused[0]


class Held:
    """Keeps the thread that tokenizes busy until it is let go."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        started, self._go = threading.Event(), threading.Event()
        tokenize = ChatText.tokenize

        def wait(chat: ChatText, request: Tokenize, text: str, *history: Any) -> Any:
            self.order.append(text)
            started.set()
            assert self._go.wait(TIMEOUT_S)
            return tokenize(chat, request, text, *history)

        monkeypatch.setattr(ChatText, "tokenize", wait)
        self.first = Text(served, "first")
        assert started.wait(TIMEOUT_S)

    def let_go(self) -> None:
        self._go.set()


def test_texts_are_tokenized_in_their_order_while_the_engine_is_full(
    serve: Callable[..., Served], text: ChatText, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(slow=True, max_running=1, max_waiting=0)
    running = served.ask(max_tokens=400, ignore_eos=True)
    wait_until(lambda: served.busy() == 1)
    held = Held(served, monkeypatch)
    texts = [Text(served, f"text {number}") for number in range(3)]
    held.let_go()
    assert [each.ids for each in texts] == [text.tokenizer.encode(f"text {number}") for number in range(3)]
    assert held.order == ["first", "text 0", "text 1", "text 2"]
    assert not running.ended.is_set()
    running.gone = True


def test_no_more_than_64_texts_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(served, monkeypatch)
    waiting = [Text(served) for _ in range(TEXTS_WAITING)]
    served.probe()  # so that these have been taken
    with monkeypatch.context() as patched:
        patched.setattr(module, "decode_request", None)  # a million ids are not read to refuse them
        over = Text(served)
        assert over.code is RefusalCode.QUEUE_FULL
    served.probe()
    held.let_go()
    assert all(each.ids for each in waiting)
    assert Text(served).ids


def test_a_text_that_is_stuck_is_no_sign_of_life(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(served, monkeypatch)
    wait_until(lambda: served.probe().heartbeat_age_s > 0.5)
    held.let_go()
    assert held.first.ids
    wait_until(lambda: served.probe().heartbeat_age_s < 0.5)


@pytest.mark.parametrize(
    ("document", "prompt"),
    [
        (b'{"tokenize":"words"}', b""),
        (b'{"tokenize":"text","role":"system"}', b""),
        (b'{"detokenize":[99999999]}', b""),
        (b'{"tokenize":"text"}', b"\xff"),
    ],
)
def test_a_text_that_makes_no_sense_is_refused_alone(served: Served, document: bytes, prompt: bytes) -> None:
    broken = FakeResponder()
    served.service.submit([Arrival(broken, Inputs(prompt, b"", document))])
    after = Text(served)
    assert broken.wait().refused[0] is RefusalCode.INVALID_REQUEST
    assert after.ids


def test_ids_become_text(served: Served, text: ChatText) -> None:
    ids = text.tokenizer.encode("hello")
    answer = served.send(f'{{"detokenize":{ids}}}'.encode()).wait()
    assert answer.text == "hello"
    assert answer.metas[0].tokenized.ids is None


def test_a_failure_is_not_told_and_ends_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr(ChatText, "tokenize", fail)
        failed = Text(served)
        assert failed.code is RefusalCode.INTERNAL
        assert "secret" not in failed.responder.refused[1]
    assert Text(served).ids


def test_who_left_or_whose_time_is_over_is_not_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(served, monkeypatch)
    late, patient = Text(served, "late", deadline_ms=1), Text(served, "patient", deadline_ms=10**9)
    gone = Text(served, "gone", FakeResponder(gone=True))
    served.probe()  # so that these have been taken
    monkeypatch.setattr(module, "LONGEST_WAIT_MS", 1)
    too_late = Text(served, "too late", deadline_ms=10**9)
    served.probe()
    time.sleep(0.5)  # the sender has asked about all of them
    held.let_go()
    assert late.code is too_late.code is RefusalCode.DEADLINE_EXCEEDED
    assert gone.code is RefusalCode.CANCELLED
    assert patient.ids
    assert held.order == ["first", "patient"]


def test_all_texts_are_answered_when_the_model_is_unloaded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(served, monkeypatch)
    waiting = Text(served)
    closing = threading.Thread(target=served.service.close)
    closing.start()
    wait_until(served.service._closing.is_set)
    held.let_go()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert held.first.ids
    assert waiting.code is RefusalCode.SHUTTING_DOWN
