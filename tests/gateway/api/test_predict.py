import asyncio
import base64
from typing import Any

import pytest

from gateway.errors import GatewayError, InvalidRequestError, UnavailableError
from gateway.prediction import Prediction, PredictionAnswer
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import Served, in_process, on_socket, until
from wire.strings import unpack_strings

PREDICT = "/MutilBackendService/Predict"


def body(model: str = "glm", **changes: Any) -> dict[str, Any]:
    prompt = {
        "name": "prompt",
        "datatype": "BYTES",
        "shape": [-1],
        "contents": {"bytes_contents": [base64.b64encode("你好".encode()).decode()]},
    }
    return {"model_name": model, "inputs": [prompt], **changes}


async def refusal(served: Served, document: Any, **options: Any) -> tuple[int, Any, Any]:
    answer = await served.http.post(PREDICT, json=document, **options)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


async def test_a_prediction_is_answered_and_counted() -> None:
    upstream = FakeUpstream()
    async with in_process(upstream) as served:
        answer = await served.http.post(PREDICT, json=body(id="7"), headers={"X-Request-Id": "mine"})
        document = answer.json()
        assert document["outputs"] == [{"name": "prompt", "datatype": "BYTES", "shape": ["1"]}]
        (raw,) = document["raw_output_contents"]
        assert unpack_strings(base64.b64decode(raw)) == ["你好".encode()]
        assert (document["model_name"], document["id"]) == ("glm", "7")
        assert upstream.predictions[0].request_id == "mine"
        assert served.metric("requests_total", route=PREDICT, model="glm", status="200") == 1
        assert served.metric("overhead_seconds_count", model="glm") == 1
        await served.until_idle()


async def test_only_served_models_can_be_named() -> None:
    async with in_process(FakeUpstream()) as served:
        for name in ("other", "glm-stream", "glm-tokenizer", ""):
            assert await refusal(served, body(name)) == (404, "model_name", "model_not_found")
    assert not served.upstream.predictions


async def test_a_bad_body_is_a_400_naming_the_field() -> None:
    async with in_process(FakeUpstream()) as served:
        assert await refusal(served, body(surprise=1)) == (400, "surprise", None)
        assert (await refusal(served, []))[0] == 400
        broken = await served.http.post(PREDICT, content=b"{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        assert (await served.http.post(PREDICT, content=b"{}")).status_code == 415
        assert (await served.http.get(PREDICT)).status_code == 405


@pytest.mark.parametrize(
    "error", [InvalidRequestError("bad", param="inputs.0.name"), UnavailableError("away")]
)
async def test_the_upstreams_errors_are_told(error: GatewayError) -> None:
    async def fail(request: Prediction) -> PredictionAnswer:
        raise error

    upstream = FakeUpstream()
    upstream.predicting = fail
    async with in_process(upstream) as served:
        assert await refusal(served, body()) == (error.status, error.param, error.code)
        await served.until_idle()


async def test_a_key_with_the_scope_is_needed() -> None:
    keys = [{"name": "a", "key": "sk-1"}, {"name": "b", "key": "sk-2", "scopes": ["admin"]}]
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        statuses = [
            (
                await served.http.post(PREDICT, json=body(), headers={"authorization": f"Bearer {key}"})
            ).status_code
            for key in ("sk-1", "sk-2", "sk-3")
        ]
    assert statuses == [200, 403, 401]


async def hang(request: Prediction) -> PredictionAnswer:
    await asyncio.Event().wait()
    raise AssertionError


async def test_the_deadline_ends_it() -> None:
    upstream = FakeUpstream()
    upstream.predicting = hang
    async with in_process(upstream, request_timeout_s=3) as served:
        assert (await refusal(served, body()))[0] == 504
        await served.until_idle()
    assert upstream.cancelled == 1


async def test_a_client_that_hangs_up_is_noticed() -> None:
    upstream = FakeUpstream()
    upstream.predicting = hang
    async with on_socket(upstream) as served:
        await served.hang_up(served.http.post(PREDICT, json=body()))
        await until(lambda: upstream.cancelled == 1)
        await served.until_idle()
        await until(lambda: served.metric("client_cancels_total", model="glm") == 1)


async def test_they_wait_for_admission_like_all_generations() -> None:
    upstream = FakeUpstream()
    upstream.predicting = hang
    async with on_socket(upstream, max_in_flight=1, max_waiting=1) as served:
        tasks = [asyncio.create_task(served.http.post(PREDICT, json=body())) for _ in range(2)]
        await until(lambda: served.gateway.admission.waiting == 1)
        assert (await served.chat()).status_code == 429
        assert (await refusal(served, body()))[0] == 429
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await served.until_idle()
