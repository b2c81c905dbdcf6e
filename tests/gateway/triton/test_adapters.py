import pytest

from gateway.core.request import Generation, PlainText
from gateway.core.upstream import Embedding, Tokenization
from gateway.errors import InvalidRequestError, ModelNotFoundError
from gateway.triton.adapters import WithAdapters
from tests.gateway.fake_upstream import FakeUpstream


@pytest.fixture
def fake() -> FakeUpstream:
    return FakeUpstream()


@pytest.fixture
def upstream(fake: FakeUpstream) -> WithAdapters:
    return WithAdapters(fake, lambda: {"org/tuned": "glm", "other": "absent"})


def test_adapters_stand_behind_their_models(upstream: WithAdapters) -> None:
    listed = [(card.id, card.parent) for card in upstream.models()]
    assert listed == [("glm", None), ("org/tuned", "glm"), ("org/glm-2", None)]
    assert upstream.model("org/tuned").parent == "glm"
    with pytest.raises(ModelNotFoundError, match="absent"):
        upstream.model("other")


async def test_the_entry_gets_the_request_and_the_adapters_name(
    upstream: WithAdapters, fake: FakeUpstream
) -> None:
    for model in ("glm", "org/tuned"):
        request = Generation(request_id="r", model=model, prompt=PlainText("a"), deadline=0.0)
        assert [event async for event in upstream.generate(request)]
        work = Tokenization(request_id="r", model=model, prompt=PlainText("a"), deadline=0.0)
        assert (await upstream.tokenize(work)).ids == (97,)
    assert [(each.model, each.adapter) for each in fake.requests] == [("glm", None), ("glm", "org/tuned")]
    assert [each.model for each in fake.tokenizations] == ["glm", "glm"]


async def test_what_only_an_entry_can_do(upstream: WithAdapters) -> None:
    with pytest.raises(InvalidRequestError, match="with glm"):
        await upstream.load("org/tuned", reload=False, upstream=None)
    with pytest.raises(InvalidRequestError, match="with glm"):
        await upstream.unload("org/tuned", upstream=None)
    work = Embedding(request_id="r", model="org/tuned", prompt=PlainText("a"), deadline=0.0)
    with pytest.raises(InvalidRequestError, match="adapter"):
        await upstream.embed(work)
    assert await upstream.load("glm", reload=False, upstream=None)
