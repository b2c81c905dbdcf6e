import pytest

from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects import Dialects
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.triton.fake_triton import having


@pytest.mark.parametrize("more", [set(), {"more"}])
def test_our_own_contract_is_known_by_its_three_inputs(more: set[str]) -> None:
    assert Dialects().of("m", having(frozenset({"sampling", "prompt", "history"} | more))) is CHATGLM


@pytest.mark.parametrize(
    "inputs",
    [
        {"text_input", "stream"},
        {"input_ids"},
        {"prompt", "history"},
        {"prompt", "history", "temperature", "max_token"},
    ],
)
def test_any_other_contract_is_an_error_that_names_the_inputs(inputs: set[str]) -> None:
    with pytest.raises(UpstreamProtocolError) as raised:
        Dialects().of("m", having(frozenset(inputs)))
    assert "'m'" in raised.value.message
    assert all(name in raised.value.message for name in inputs)


def test_a_model_without_inputs_is_an_error_too() -> None:
    with pytest.raises(UpstreamProtocolError, match="none"):
        Dialects().of("m", having(frozenset()))


def test_our_own_contract_has_all_optional_parts() -> None:
    assert CHATGLM.probe is not None
    assert CHATGLM.channels is not None
    assert CHATGLM.tokenizer is not None
