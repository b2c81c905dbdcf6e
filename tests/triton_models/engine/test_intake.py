import threading

import pytest

from tests.triton_models.engine.fake_model import request
from triton_models.engine.intake import Intake
from triton_models.errors import (
    DuplicateRequestError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)


def test_requests_and_cancels_are_collected_once_and_in_order() -> None:
    intake = Intake(4)
    first, second = request("a"), request("b")
    intake.add([first], 1.0)
    intake.add([second], 2.0)
    assert intake.cancel("b")
    assert not intake.cancel("unknown")
    assert intake.collect() == ([(first, 1.0), (second, 2.0)], ["b"])
    assert intake.collect() == ([], [])
    assert intake.open == 2


def test_an_id_is_taken_until_its_request_ends() -> None:
    intake = Intake(4)
    intake.add([request("a")], 0.0)
    intake.collect()
    with pytest.raises(DuplicateRequestError):
        intake.add([request("a")], 0.0)
    intake.end("a")
    assert not intake.cancel("a")
    intake.add([request("a")], 0.0)


def test_a_late_cancel_does_not_meet_the_next_request_of_its_id() -> None:
    intake = Intake(4)
    intake.add([request("a")], 0.0)
    intake.collect()
    assert intake.cancel("a")
    intake.end("a")
    intake.add([request("a")], 0.0)
    assert intake.collect()[1] == []


def test_requests_that_come_together_are_taken_together_or_not_at_all() -> None:
    intake = Intake(4)
    intake.add([request("a"), request("b")], 0.0)
    with pytest.raises(QueueFullError):
        intake.add([request(name) for name in "cde"], 0.0)
    with pytest.raises(DuplicateRequestError):
        intake.add([request("c"), request("b")], 0.0)
    with pytest.raises(InvalidRequestError, match="5 requests"):
        intake.add([request(name) for name in "cdefg"], 0.0)
    assert intake.open == 2
    intake.add([request("c"), request("d")], 0.0)
    assert [each.request_id for each, _ in intake.collect()[0]] == list("abcd")


def test_the_limit_holds_under_many_threads() -> None:
    intake = Intake(10)
    refused: list[str] = []
    start = threading.Barrier(40)

    def add(name: str) -> None:
        start.wait()
        try:
            intake.add([request(name)], 0.0)
        except QueueFullError:
            refused.append(name)

    threads = [threading.Thread(target=add, args=(str(number),)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 30
    assert len(intake.collect()[0]) == intake.open == 10


def test_a_closed_intake_still_gives_what_it_took() -> None:
    intake = Intake(4)
    intake.add([request("a")], 0.0)
    intake.close()
    with pytest.raises(EngineStoppedError):
        intake.add([request("b")], 0.0)
    assert [each.request_id for each, _ in intake.collect()[0]] == ["a"]
