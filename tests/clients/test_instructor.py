"""instructor: an object by a forced call, by a schema of the answer, and while it is written."""

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

ASKED: dict[str, Any] = {
    "model": "chatglm3-demo",
    "messages": [{"role": "user", "content": "襄阳今天天气怎么样？"}],
    "temperature": 0,
    "max_tokens": 120,
    "max_retries": 0,
}


class City(BaseModel):
    city: str


class Sky(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "rainy"]


@pytest.fixture
def client(demo_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=demo_url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_an_object_by_a_forced_call(client: OpenAI) -> None:
    patched = instructor.from_openai(client)
    assert patched.chat.completions.create(response_model=City, **ASKED).city == "襄阳"


def test_an_object_by_a_schema_of_the_answer(client: OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(patched.chat.completions.create(response_model=Sky, **ASKED), Sky)


def test_an_object_while_it_is_written(client: OpenAI) -> None:
    patched = instructor.from_openai(client)
    *_, whole = patched.chat.completions.create_partial(response_model=City, **ASKED)
    assert whole.city == "襄阳"
