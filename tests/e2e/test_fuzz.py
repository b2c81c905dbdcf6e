"""Requests made up from the OpenAPI document, against the real Triton and engine."""

import httpx
import pytest
import schemathesis

from tests.e2e.up_process import UpProcess
from tests.gateway.fuzzing import RIGHT, pinned, run

pytestmark = pytest.mark.e2e

CASES = 15
SHORT = {"max_tokens": 4, "n": 1}
MORE = {
    "POST /v1/chat/completions": (SHORT, {**SHORT, "stream": True, "max_completion_tokens": None}),
    "POST /v1/completions": (SHORT, {**SHORT, "stream": True}),
    "POST /v1/responses": ({"max_output_tokens": 4}, {"max_output_tokens": 4, "stream": True}),
    "POST /v1/messages": ({"max_tokens": 4}, {"max_tokens": 4, "stream": True}),
    "POST /tokenize": ({},),
    "POST /detokenize": ({"tokens": [5, 300, 7]},),
}


@pytest.mark.parametrize("label", MORE)
def test_the_real_engine_answers_as_documented(label: str, up: UpProcess) -> None:
    document = httpx.get(up.base_url + "/openapi.json", timeout=60).json()
    schema = schemathesis.openapi.from_dict(pinned(document, ["chatglm2", "chatglm3"]))
    operation = next(each.ok() for each in schema.get_all_operations() if each.ok().label == label)
    statuses = run(
        operation, RIGHT, cases=CASES, call=lambda case: case.call(base_url=up.base_url), more=MORE[label]
    )
    assert statuses[200], statuses
