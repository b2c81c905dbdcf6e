import threading

import pytest

from triton_models.text.grammars import STACK_BYTES, on_deep_stack


def test_it_runs_elsewhere_and_brings_back_what_came_of_it() -> None:
    assert on_deep_stack(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)


def test_only_that_thread_has_the_stack() -> None:
    usual = threading.stack_size()
    assert usual != STACK_BYTES
    assert on_deep_stack(threading.stack_size) in {usual, STACK_BYTES}
    assert threading.stack_size() == usual
