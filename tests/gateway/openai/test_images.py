"""Images in messages: which are taken, which are refused by name, and where they stand in the text."""

from typing import Any

import pytest

from gateway.core.request import Image
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.document import Reading, validate
from gateway.openai.images import images_of
from gateway.openai.responses_request import ResponsesRequest

DATA = "data:image/png;base64,iVBORw0KGgo="
TEXT = {"type": "text", "text": "Look: "}


def chat(*parts: Any, role: str = "user") -> ChatRequest:
    body = {"model": "m", "messages": [{"role": role, "content": list(parts)}]}
    return validate(ChatRequest, body, Reading())


def image(url: str = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_images_stand_between_texts() -> None:
    (message,) = chat(TEXT, image(), {"type": "text", "text": "and"}, image()).continued.messages
    assert message.content == "Look: and"
    assert [(each.at, each.data) for each in message.images] == [(6, "iVBORw0KGgo="), (9, "iVBORw0KGgo=")]
    assert [each.field for each in message.images] == ["messages.0.content.1", "messages.0.content.3"]


def test_a_content_without_images_is_a_text() -> None:
    request = chat(TEXT, TEXT)
    assert request.messages[0].content == "Look: Look: "
    assert images_of(request.messages[0].content) == ()


def test_an_image_of_a_response() -> None:
    content = [{"type": "input_text", "text": "Hm"}, {"type": "input_image", "image_url": DATA}]
    body = {"model": "m", "input": [{"role": "user", "content": content}]}
    (message,) = validate(ResponsesRequest, body, Reading()).continued.messages
    assert message.images == (Image(url=DATA, at=2),)
    assert message.images[0].field == "input.0.content.1"


def test_its_detail_is_advice() -> None:
    reading = Reading()
    body = {"model": "m", "messages": [{"role": "user", "content": [image(detail="low")]}]}
    validate(ChatRequest, body, reading)
    assert list(reading.ignored) == ["messages.content.image_url.detail"]


def test_the_default_detail_is_accepted_without_a_word() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [image(detail="auto")]}]}
    validate(ChatRequest, {"model": "m", **body}, Reading(strict=True))
    part = {"type": "input_image", "image_url": DATA, "detail": "auto"}  # which OpenAI's SDK demands there
    body = {"input": [{"role": "user", "content": [part]}]}
    validate(ResponsesRequest, {"model": "m", **body}, Reading(strict=True))


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/a.png",
        "https://example.org/a.png",
        "file:///etc/passwd",
        "data:,",
        "data:text/plain;base64,aGk=",
        "data:image/png;base64,",
        "data:image/png;base64,a",
        "data:image/png;base64,iVBO\nRw0KGgo=",
        "data:image/png;base64,\u00e4",
    ],
)
def test_other_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(image(url))
    assert refused.value.param == "messages.0.content.0.image_url.url"
    body = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    with pytest.raises(InvalidRequestError) as refused:
        validate(ResponsesRequest, body, Reading())
    assert refused.value.param == "input.0.content.0.image_url"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_a_user_shows_images(role: str) -> None:
    with pytest.raises(InvalidRequestError, match="role user") as refused:
        chat(image(), role=role)
    assert refused.value.param == "messages.0.content"
