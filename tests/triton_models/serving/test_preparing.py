import threading
from typing import Any

import pytest

from tests.triton_models.serving.fakes import FakeResponder, wait_until
from triton_models.errors import InvalidGrammarError, QueueFullError
from triton_models.serving.open_request import OpenRequest
from triton_models.serving.preparing import COMPILERS, WAITING, Preparing
from wire.grammar import Grammar
from wire.sampling import Generation


def opened(key: str, *, held: bool = False, pattern: str = "a", **more: Any) -> OpenRequest:
    grammar = Grammar("regex", pattern) if held else None
    return OpenRequest(key, Generation(grammar=grammar, **more), FakeResponder())


class Compiler:
    """Notes whose grammars it is asked for, and takes until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def __call__(self, generation: Generation) -> None:
        assert generation.grammar is not None
        self.asked.append(generation.grammar.text)
        assert self.go.wait(20)


def test_nobody_waits_for_a_grammar_that_is_compiled() -> None:
    compiled = threading.Event()
    prepared: list[tuple[str, str, Any]] = []

    def compile_grammar(generation: Generation) -> None:
        assert compiled.wait(20)

    preparing = Preparing[str](
        compile_grammar, lambda request, inputs, future: prepared.append((request.key, inputs, future))
    )
    preparing.submit(opened("held", held=True), "a")
    preparing.submit(opened("free"), "b")
    wait_until(lambda: bool(prepared))
    assert prepared == [("free", "b", None)]
    compiled.set()
    preparing.close()
    (_, (key, inputs, future)) = prepared
    assert (key, inputs) == ("held", "a")
    assert future is not None
    assert future.result() is None


def test_what_compiling_raises_is_told_where_the_request_is_prepared() -> None:
    errors: list[BaseException | None] = []

    def compile_grammar(generation: Generation) -> None:
        raise InvalidGrammarError("broken")

    preparing = Preparing[str](
        compile_grammar, lambda _request, _inputs, future: errors.append(future and future.exception())
    )
    preparing.submit(opened("held", held=True), "a")
    preparing.close()
    (error,) = errors
    assert isinstance(error, InvalidGrammarError)


def test_nothing_is_compiled_for_who_gave_up() -> None:
    compiler, prepared = Compiler(), list[str]()
    preparing = Preparing[str](compiler, lambda request, _inputs, _future: prepared.append(request.key))
    for number in range(COMPILERS):
        preparing.submit(opened(f"busy{number}", held=True, pattern="busy"), "")
    cancelled = opened("cancelled", held=True, pattern="cancelled")
    preparing.submit(cancelled, "")
    preparing.submit(opened("late", held=True, pattern="late", deadline_ms=1), "")
    preparing.submit(opened("patient", held=True, pattern="patient"), "")
    cancelled.cancelled = True
    late = opened("sooner", deadline_ms=1)
    wait_until(lambda: late.given_up() is not None)
    compiler.go.set()
    wait_until(lambda: len(prepared) == COMPILERS + 3)
    preparing.close()
    assert sorted(compiler.asked) == ["busy"] * COMPILERS + ["patient"]


def test_who_gives_up_leaves_the_list_at_once() -> None:
    compiler, prepared = Compiler(), dict[str, Any]()
    preparing = Preparing[str](
        compiler, lambda request, _inputs, future: prepared.update({request.key: future})
    )
    busy = [opened(f"busy{number}", held=True, pattern=f"busy{number}") for number in range(COMPILERS)]
    waiting = [opened(f"{number}", held=True, pattern=f"{number}") for number in range(WAITING - COMPILERS)]
    for request in [*busy, *waiting]:
        preparing.submit(request, "")
    wait_until(lambda: len(compiler.asked) == COMPILERS)
    for request in (waiting[-1], busy[0]):
        request.cancelled = True
        preparing.give_up(request)
    wait_until(lambda: list(prepared) == [waiting[-1].key])
    assert prepared[waiting[-1].key].cancelled()
    preparing.submit(opened("more", held=True, pattern="more"), "")  # in its place
    gone = opened("gone", held=True, pattern="more")
    gone.cancelled = True
    preparing.submit(gone, "")
    wait_until(lambda: "gone" in prepared)
    preparing.give_up(opened("free"))
    compiler.go.set()
    preparing.close()
    assert len(prepared) == WAITING + 2
    assert waiting[-1].generation.grammar.text not in compiler.asked


def test_closing_waits_for_no_grammar_that_was_not_begun() -> None:
    compiler, prepared = Compiler(), list[str]()
    preparing = Preparing[str](compiler, lambda request, _inputs, _future: prepared.append(request.key))
    for number in range(COMPILERS + 9):
        preparing.submit(opened(f"{number}", held=True, pattern=f"{number}"), "")
    wait_until(lambda: len(compiler.asked) == COMPILERS)
    closing = threading.Thread(target=preparing.close)
    closing.start()
    wait_until(preparing._closing.is_set)
    compiler.go.set()
    closing.join(20)
    assert len(compiler.asked) == COMPILERS
    assert len(prepared) == COMPILERS + 9


def test_so_many_grammars_wait_and_any_number_of_requests_for_them() -> None:
    compiler, prepared = Compiler(), list[str]()
    preparing = Preparing[str](compiler, lambda request, _inputs, _future: prepared.append(request.key))
    for number in range(WAITING):
        preparing.submit(opened("first", held=True, pattern=f"{number}"), "")
        preparing.submit(opened("again", held=True, pattern=f"{number}"), "")
    with pytest.raises(QueueFullError, match=f"{WAITING} grammars"):
        preparing.submit(opened("more", held=True, pattern="more"), "")
    preparing.submit(opened("free"), "")
    compiler.go.set()
    wait_until(lambda: len(prepared) == 2 * WAITING + 1)
    preparing.submit(opened("more", held=True, pattern="more"), "")
    wait_until(lambda: "more" in prepared)
    preparing.close()
