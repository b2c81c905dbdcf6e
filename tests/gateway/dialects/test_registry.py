import pytest

from gateway.dialects.chatglm import ChatGLMDialect
from gateway.dialects.chatglm_channel import ChatGLMChannels
from gateway.dialects.chatglm_nudges import ChatGLMNudges
from gateway.dialects.registry import choose, choose_channels, choose_nudges
from gateway.errors import UpstreamProtocolError


def test_our_own_contract_is_known_by_its_three_inputs() -> None:
    assert isinstance(choose("m-stream", frozenset({"sampling", "prompt", "history"})), ChatGLMDialect)


@pytest.mark.parametrize(
    "inputs",
    [
        {"text_input", "sampling_parameters", "stream"},
        {"prompt", "history"},
        {"prompt", "history", "temperature", "max_token"},
        {"prompt", "history", "sampling", "more"},
    ],
)
def test_any_other_contract_is_an_error_that_names_the_inputs(inputs: set[str]) -> None:
    with pytest.raises(UpstreamProtocolError) as raised:
        choose("m-stream", frozenset(inputs))
    assert "'m-stream'" in raised.value.message
    assert all(name in raised.value.message for name in inputs)


def test_a_model_without_inputs_is_an_error_too() -> None:
    with pytest.raises(UpstreamProtocolError, match="none"):
        choose("m-stream", frozenset())


def test_our_own_contract_has_delta_channels_and_one_not_known_has_none() -> None:
    assert isinstance(choose_channels(ChatGLMDialect()), ChatGLMChannels)
    assert choose_channels(object()) is None


def test_our_own_contract_has_requests_that_cost_nothing_and_one_not_known_has_none() -> None:
    assert isinstance(choose_nudges(ChatGLMDialect()), ChatGLMNudges)
    assert choose_nudges(object()) is None
