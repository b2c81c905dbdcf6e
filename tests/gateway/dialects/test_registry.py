import pytest

from gateway.dialects.chatglm import ChatGLMDialect
from gateway.dialects.registry import choose
from gateway.errors import UpstreamProtocolError


def test_our_own_contract_is_known_by_its_three_inputs() -> None:
    assert isinstance(choose("m", frozenset({"sampling", "prompt", "history"})), ChatGLMDialect)


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
        choose("m", frozenset(inputs))
    assert "'m'" in raised.value.message
    assert all(name in raised.value.message for name in inputs)


def test_a_model_without_inputs_is_an_error_too() -> None:
    with pytest.raises(UpstreamProtocolError, match="none"):
        choose("m", frozenset())


def test_our_own_contract_has_all_optional_parts() -> None:
    dialect = ChatGLMDialect()
    assert dialect.channels is not None
    assert dialect.tokenizer is not None
