"""`/v1/embeddings`, on the fake upstream."""

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import in_process


async def test_vectors_come_in_the_texts_order_and_are_counted() -> None:
    async with in_process(FakeUpstream()) as served:
        texts = ["a" * (1 + number % 7) for number in range(100)]
        answer = (await served.http.post("/v1/embeddings", json={"model": "glm", "input": texts})).json()
        assert [each["embedding"][0] for each in answer["data"]] == [len(text) for text in texts]
        assert [each["index"] for each in answer["data"]] == list(range(100))
        assert answer["usage"]["total_tokens"] == sum(map(len, texts))
        assert served.metric("requests_total", route="/v1/embeddings", model="glm", status="200") == 1
        assert served.metric("prompt_tokens_total", model="glm") == answer["usage"]["total_tokens"]
        assert served.metric("requests_in_flight", model="glm") == 0


async def test_a_model_that_does_not_embed_is_named() -> None:
    async with in_process(FakeUpstream()) as served:
        served.upstream.embeds = False
        answer = await served.http.post("/v1/embeddings", json={"model": "glm", "input": ["a", "b"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        unknown = await served.http.post("/v1/embeddings", json={"model": "x", "input": "a"})
        assert unknown.status_code == 404
