import openai
import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.kserve.legacy import body, echo
from tests.gateway.serving import MESSAGES, in_process, on_socket


async def test_models() -> None:
    async with on_socket(FakeUpstream()) as served:
        assert [model.id async for model in served.sdk.models.list()] == ["glm", "org/glm-2"]
        model = await served.sdk.models.retrieve("glm")
        assert (model.id, model.object, model.created, model.owned_by) == ("glm", "model", 1, "tritongate")
        assert (await served.http.get("/v1/models/org/glm-2")).json()["max_model_len"] == 64
        with pytest.raises(openai.NotFoundError) as missing:
            await served.sdk.models.retrieve("other")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError) as missing:
            await served.sdk.chat.completions.create(model="other", messages=MESSAGES)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        assert "The model 'other' does not exist. GET /v1/models lists" in missing.value.message


async def test_defaults_stand_in_for_what_a_request_leaves_out() -> None:
    defaults = {"temperature": 0.25, "top_k": 5, "seed": 7, "max_tokens": 9}
    upstream = FakeUpstream()
    async with in_process(upstream, models={"glm": {"defaults": defaults}, "org/glm-2": {}}) as served:
        await served.chat(temperature=None)
        await served.chat(temperature=1, top_k=0)
        await served.chat(model="org/glm-2")
        sent = [(each.temperature, each.top_k, each.seed) for each in upstream.requests]
        assert sent == [(0.25, 5, 7), (1.0, 0, 7), (1.0, 0, None)]
        answer = await served.http.post("/v1/responses", json={"model": "glm", "input": "hi"})
        assert answer.json()["temperature"] == 0.25
        assert "x-tritongate-ignored" not in answer.headers


async def test_a_top_p_of_0_is_the_least_that_backends_take() -> None:
    upstream = FakeUpstream()
    routes: dict[str, dict[str, object]] = {
        "chat/completions": {"messages": MESSAGES},
        "completions": {"prompt": "a"},
        "responses": {"input": "a"},
        "messages": {"messages": MESSAGES, "max_tokens": 9},
    }
    async with in_process(upstream, models={"glm": {}, "org/glm-2": {"defaults": {"top_p": 0}}}) as served:
        for path, asked in routes.items():
            whole = {"model": "glm", "top_p": 0, "top_k": 0, **asked}
            answer = await served.http.post(f"/v1/{path}", json=whole)
            assert answer.status_code == 200
            assert answer.json().get("top_p", 0) == 0
        await served.chat(model="org/glm-2")
    assert [each.top_p for each in upstream.requests] == [1e-9] * (len(routes) + 1)


async def test_defaults_reach_clients_of_triton_where_they_say_nothing() -> None:
    upstream = FakeUpstream(echo)
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 5}
    async with in_process(upstream, models={"glm": {"defaults": defaults}, "org/glm-2": {}}) as served:
        for model in ("glm", "org%2Fglm-2"):
            answer = await served.http.post(f"/v2/models/{model}/infer", json=body())
            assert answer.status_code == 200
    asked = [(each.temperature != 0.25, each.top_p, each.top_k) for each in upstream.requests]
    assert asked == [(True, 0.5, 5), (True, 0.8, 0)]


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 9}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 9}, "max_tokens"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}, "max_output_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "min_tokens": 9}, "min_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, "n"),
    ],
)
async def test_limits_name_the_field(path: str, asked: dict[str, object], param: str) -> None:
    upstream = FakeUpstream()
    async with in_process(upstream, models={"glm": {"limits": {"max_tokens": 8, "n": 2}}}) as served:
        answer = await served.http.post(path, json={"model": "glm"} | asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not upstream.requests


@pytest.mark.parametrize(
    ("limits", "allows"),
    [
        ({"n": 2}, "this model allows 2"),
        ({"n": 9}, "this gateway allows 4"),
        ({}, "this gateway allows 4"),
    ],
)
@pytest.mark.parametrize(
    ("path", "asked", "many"),
    [
        ("chat/completions", {"messages": MESSAGES, "n": 5}, "n is 5"),
        ("completions", {"prompt": ["a"] * 5}, "There are 5 prompts"),
        ("completions", {"prompt": "a", "use_beam_search": True, "best_of": 5}, "best_of is 5"),
    ],
)
async def test_more_answers_than_a_limit_are_told_whose_it_is(
    path: str, asked: dict[str, object], many: str, limits: dict[str, int], allows: str
) -> None:
    models = {"glm": {"limits": limits}}
    async with in_process(FakeUpstream(), models=models, max_choices=4) as served:
        answer = await served.http.post(f"/v1/{path}", json={"model": "glm"} | asked)
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{many}, and {allows}"), message


async def test_a_prompt_longer_than_its_model_allows_is_refused_before_it_is_answered() -> None:
    upstream = FakeUpstream()
    async with in_process(upstream, models={"glm": {"limits": {"max_prompt_tokens": 2}}}) as served:
        for stream in (False, True):
            assert await served.refusal(stream=stream) == (400, "messages", "context_length_exceeded")
        answer = await served.http.post("/v2/models/glm/infer", json=body())
        assert answer.status_code == 400
        assert "This model's maximum context length is 2 tokens" in answer.json()["error"]
        await served.until_idle()


async def test_a_model_for_other_keys_does_not_exist_at_any_door() -> None:
    keys = [{"name": name, "key": name, "scopes": ["inference", "admin"]} for name in ("ann", "bob")]
    models = {"glm": {"keys": ["ann"]}, "org/glm-2": {}}
    async with in_process(FakeUpstream(), models=models, api_keys=keys) as served:
        for key, there in (("ann", True), ("bob", False)):
            headers = {"Authorization": f"Bearer {key}"}
            listed = (await served.http.get("/v1/models", headers=headers)).json()["data"]
            assert ("glm" in [each["id"] for each in listed]) is there
            index = (await served.http.post("/v2/repository/index", headers=headers)).json()
            assert ("glm" in [each["name"] for each in index]) is there
            asked = [
                served.http.get("/v1/models/glm", headers=headers),
                served.http.get("/tokenizer_info?model=glm", headers=headers),
                served.http.get("/v2/models/glm", headers=headers),
                served.http.get("/v2/models/glm/stats", headers=headers),
                served.http.post("/tokenize", json={"model": "glm", "prompt": "a"}, headers=headers),
                served.http.post("/v1/completions", json={"model": "glm", "prompt": "a"}, headers=headers),
            ]
            assert {(await each).status_code for each in asked} == {200 if there else 404}
            # Left out, it is the only one that this key may use.
            answer = await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == (400 if there else 200)
            # Whoever controls models controls all.
            answer = await served.http.post("/v1/models/glm/load", headers=headers)
            assert answer.status_code == 200


@pytest.mark.parametrize("keys", [[], [{"name": "a", "key": "a"}]])
async def test_a_name_that_no_model_has_is_not_repeated(keys: list[dict[str, str]]) -> None:
    name = "x" * 1_000_000
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        served.http.headers["Authorization"] = "Bearer a"
        for path in ("/v1/completions", "/tokenize"):
            answer = await served.http.post(path, json={"model": name, "prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            assert len(answer.content) < 1000
        for path in (f"/v1/models/{name[:300]}", f"/v2/models/{name[:300]}"):
            answer = await served.http.get(path)
            assert answer.status_code == 400
            assert "xxx" not in answer.text
        assert (await served.http.get(f"/v1/models/{name[:256]}")).status_code == 404
