"""The whole HTTP surface against its own OpenAPI document, on the fake upstream.

`FUZZ_CASES` is how many requests are made of each operation and kind; `make fuzz` makes 2,000 in all.
"""

import os
from typing import Any

import pytest
import schemathesis

from gateway.app import create_app
from tests.gateway.fake_upstream import FakeUpstream, say_choices
from tests.gateway.fuzzing import GENERATING, RIGHT, WRONG, pinned, run
from tests.gateway.serving import settings

CASES = int(os.environ.get("FUZZ_CASES", "19"))
APP = create_app(settings(), FakeUpstream(say_choices))
SCHEMA = schemathesis.openapi.from_dict(pinned(APP.openapi(), ["glm", "org/glm-2", "nobody"]))
SCHEMA.app = APP
OPERATIONS = {operation.label: operation for operation in (each.ok() for each in SCHEMA.get_all_operations())}
WITH_BODY = [label for label, operation in OPERATIONS.items() if operation.body]


def call(case: Any) -> Any:
    """Send a case by a name that the routes for admins accept of this machine."""
    return case.call(headers={"Host": "localhost"})


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_is_right_is_answered_as_documented(label: str) -> None:
    more: tuple[dict[str, Any], ...] = ({}, {"stream": True}) if label in GENERATING else ({},)
    if label.endswith("/input_tokens"):  # which may be without an input, if it has instructions
        more = ({"input": "hi"},)
    statuses = run(OPERATIONS[label], RIGHT, cases=CASES, call=call, more=more)
    assert statuses[200], statuses


@pytest.mark.parametrize("label", WITH_BODY)
def test_what_is_wrong_is_refused_as_documented(label: str) -> None:
    statuses = run(OPERATIONS[label], WRONG, cases=CASES, call=call)
    assert statuses[400], statuses
    assert not statuses[200]


def test_all_routes_are_asked() -> None:
    assert len(OPERATIONS) >= 14
    assert len(WITH_BODY) >= 8
