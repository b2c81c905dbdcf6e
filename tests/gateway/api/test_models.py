import openai
import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import MESSAGES, on_socket


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
