import json
import logging

import pytest

from gateway.telemetry.logs import configure_logging, request_id


@pytest.mark.usefixtures("restored_logging")
def test_lines_are_json_with_the_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    token = request_id.set("r1")
    logging.getLogger("any").warning("提示 %s", "x", extra={"model": "m"})
    logging.getLogger("any").debug("not told")
    request_id.reset(token)
    logging.getLogger("any").info("later")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("WARNING", "any", "提示 x")
    assert (first["request_id"], first["model"]) == ("r1", "m")
    assert first["time"].endswith("+00:00")
    assert not {"request_id", "worker"} & second.keys()


@pytest.mark.usefixtures("restored_logging")
def test_lines_of_one_of_several_processes_say_which(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", worker=0)
    logging.getLogger("any").info("told")
    logging.getLogger("any").info("of another", extra={"worker": 1})
    assert [json.loads(line)["worker"] for line in capsys.readouterr().err.splitlines()] == [0, 1]
