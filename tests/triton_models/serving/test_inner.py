"""Calls of `M-stream` over a stand-in for Triton's BLS."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.triton_models.serving.fakes import TIMEOUT_S
from triton_models.errors import StreamRefusedError
from triton_models.serving import nudges
from triton_models.serving.inner import LATEST, BlsCaller
from wire import names
from wire.history import Turn, decode_history
from wire.meta import Accepted, Meta, encode_meta
from wire.refusal import RefusalCode, refusal_text
from wire.sampling import Cancel, Generation, Probe, Sampling, decode_sampling

QUIET = Generation(request_id="r", stream=False, quiet=True)
ACCEPTED = "", Meta(accepted=Accepted(request_id="r", prompt_tokens=1))
LAST = "an answer", Meta(finish_reason="stop")


class Tensor:
    def __init__(self, name: str, values: Any) -> None:
        assert values.shape == (1, 1)
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._values


class Response:
    """An answer's text and document; or an error; or the empty one that only says that it was the last."""

    def __init__(self, said: tuple[str, Meta] | str | None) -> None:
        self._said = said

    def has_error(self) -> bool:
        return isinstance(self._said, str)

    def error(self) -> "Response":
        return self

    def message(self) -> str:
        return f"Failed to process the request(s) for model 'm-stream', message: {self._said}"

    def output_tensors(self) -> list[Tensor]:
        if self._said is None:
            return []
        text, meta = self._said
        values = {names.RESPONSE: text.encode(), names.META: encode_meta(meta)}
        return [Tensor(name, np.array([[value]], dtype=np.object_)) for name, value in values.items()]


class TritonError(Exception):
    """`pb_utils.TritonModelException`."""


class FakeTriton:
    """`pb_utils`: answers each kind of request as told, and keeps what was asked."""

    Tensor = Tensor
    TritonModelException = TritonError

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, str, list[Turn], Sampling]] = []
        self.answer: Callable[[Sampling], list[tuple[str, Meta] | str | None]] = lambda _: [ACCEPTED, LAST]
        self.ready = True
        self.read_to_the_end = 0

    def is_model_ready(self, name: str, version: str) -> bool:
        assert (name, version) == ("m-stream", "")
        return self.ready

    def InferenceRequest(  # noqa: N802
        self, model_name: str, model_version: int, requested_output_names: list[str], inputs: list[Tensor]
    ) -> "Request":
        assert set(requested_output_names) == {names.RESPONSE, names.META}
        given = {tensor.name(): tensor.as_numpy()[0, 0] for tensor in inputs}
        sampling = decode_sampling(given[names.SAMPLING])
        history = decode_history(given[names.HISTORY])
        self.asked.append((model_name, model_version, given[names.PROMPT].decode(), history, sampling))
        return Request(self, sampling)


class Request:
    def __init__(self, triton: FakeTriton, sampling: Sampling) -> None:
        self._triton, self._sampling = triton, sampling

    def exec(self, *, decoupled: bool) -> Iterator[Response]:
        assert decoupled
        responses = self._triton.answer(self._sampling)

        def iterate() -> Iterator[Response]:
            yield from map(Response, responses)
            self._triton.read_to_the_end += 1

        return iterate()


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def caller(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> BlsCaller:
    monkeypatch.setattr(nudges, "AFTER_S", 1000.0)
    return BlsCaller("m-stream", LATEST, triton)


def test_a_generation(caller: BlsCaller, triton: FakeTriton) -> None:
    triton.answer = lambda _: [ACCEPTED, LAST, None]
    turns = [Turn("user", "q"), Turn("assistant", "a")]
    assert list(caller.generate("你好", turns, QUIET)) == [ACCEPTED, LAST]
    assert triton.asked == [("m-stream", LATEST, "你好", turns, QUIET)]
    assert triton.read_to_the_end == 1


def test_a_cancel(caller: BlsCaller, triton: FakeTriton) -> None:
    triton.answer = lambda _: [("", Meta(cancelled=True))]
    caller.cancel("r")
    assert [sampling for *_, sampling in triton.asked] == [Cancel("r")]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (refusal_text(RefusalCode.CANCELLED, "it was cancelled"), RefusalCode.CANCELLED, "it was cancelled"),
        ("Exceeds maximum queue size", RefusalCode.QUEUE_FULL, "its queue is full"),
        ("Request timeout expired", RefusalCode.DEADLINE_EXCEEDED, "too long"),
        ("Stub process 'm-stream_0_0' is not healthy.", RefusalCode.UNAVAILABLE, "its process has died"),
        ("a secret", RefusalCode.INTERNAL, "failed to answer"),
    ],
)
def test_errors_are_read_to_the_end_and_keep_their_codes(
    caller: BlsCaller, triton: FakeTriton, text: str, code: RefusalCode, words: str
) -> None:
    triton.answer = lambda _: [ACCEPTED, text, None]
    answer = caller.generate("", [], QUIET)
    assert next(answer) == ACCEPTED
    with pytest.raises(StreamRefusedError, match=words) as raised:
        next(answer)
    assert raised.value.code == code
    assert "secret" not in str(raised.value)
    assert triton.read_to_the_end == 1


def test_an_entry_that_is_not_loaded(caller: BlsCaller, triton: FakeTriton) -> None:
    def fail(_: Sampling) -> list[Any]:
        raise TritonError("Model 'm-stream' is not ready.")

    triton.answer, triton.ready = fail, False
    with pytest.raises(StreamRefusedError, match="m-stream is not loaded") as raised:
        list(caller.generate("", [], QUIET))
    assert raised.value.code == RefusalCode.UNAVAILABLE


def test_a_call_that_triton_has_forgotten_is_brought_back(triton: FakeTriton) -> None:
    """By a probe: any other request makes Triton look at those that wait, too."""
    caller = BlsCaller("m-stream", LATEST, triton)
    probed = threading.Event()

    def answer(sampling: Sampling) -> list[Any]:
        if isinstance(sampling, Probe):
            probed.set()
            return ["the engine has stopped"]
        assert probed.wait(TIMEOUT_S), "nothing was sent after it"
        return [ACCEPTED, LAST]

    triton.answer = answer
    assert list(caller.generate("", [], QUIET)) == [ACCEPTED, LAST]
