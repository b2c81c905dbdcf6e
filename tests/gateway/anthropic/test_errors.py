"""Every error of the gateway in Anthropic's form."""

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.anthropic.errors import is_of_messages, messages_error
from gateway.anthropic.request import CountTokensRequest
from gateway.chat.conversation import chat_form, to_turns
from gateway.errors import ContextLengthError, GatewayError, InvalidRequestError

EXPECTED = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def kinds(base: type[GatewayError] = GatewayError) -> Iterator[type[GatewayError]]:
    yield base
    for each in base.__subclasses__():
        yield from kinds(each)


@pytest.mark.parametrize("kind", list(kinds()))
def test_every_error_has_a_type(kind: type[GatewayError]) -> None:
    error = messages_error(kind("No."), "r1")
    assert error.error.type == EXPECTED.get(kind.status, "invalid_request_error")
    assert error.request_id == "r1"
    assert error.error.message == ("prompt is too long: No." if kind is ContextLengthError else "No.")


def test_the_message_names_the_field() -> None:
    assert messages_error(InvalidRequestError("No.", param="a.b"), "").error.message == "a.b: No."
    assert messages_error(InvalidRequestError("Not a.b.", param="a.b"), "").error.message == "Not a.b."


def test_a_context_that_is_exceeded_is_told_in_the_words_that_agents_look_for() -> None:
    """They have no code to go by. The end-to-end tests have the models' own words, too."""
    for said, told in (
        (
            "This model's maximum context length is 8 tokens. The prompt has 9.",
            "prompt is too long: This model's maximum context length is 8 tokens. The prompt has 9.",
        ),
        (
            (
                "This model's maximum context length is 8 tokens. However, you requested 11 tokens "
                "(5 in the messages, 6 in the completion). Please reduce the messages or completion."
            ),
            "input length and `max_tokens` exceed context limit: 5 + 6 > 8",
        ),
    ):
        assert messages_error(ContextLengthError(said, param="messages"), "").error.message == told


ASKED = {"role": "user", "content": "Sunny?"}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}


def answered(*ids: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": each} for each in ids]}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (
            [ASKED, CALLED, answered("c", "d")],
            "messages.2.content.1: unexpected `tool_use_id` found in `tool_result` blocks. ",
        ),
        (
            [ASKED, CALLED, ASKED],
            "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after. ",
        ),
        (
            [ASKED, CALLED, answered("c", "c")],
            "messages.2.content.1: each `tool_use` must have a single `tool_result`",
        ),
    ],
)
def test_calls_and_results_have_their_own_names(messages: list[Any], told: str) -> None:
    request = CountTokensRequest.model_validate({"model": "m", "messages": messages})
    with pytest.raises(InvalidRequestError) as refused:
        to_turns(request.continued.messages, chat_form("chatglm3"))
    assert messages_error(refused.value, "").error.message.startswith(told)


def test_whose_errors_these_are() -> None:
    assert all(map(is_of_messages, ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches")))
    assert not any(map(is_of_messages, ("/v1/chat/completions", "/v1/messages2", "/")))
