import pytest

from gateway.chatglm.formats import chat_form
from gateway.errors import UpstreamProtocolError
from triton_models.directory import _NAMES


def test_every_format_of_the_models_side_is_known() -> None:
    assert [chat_form(name).name for name in _NAMES] == list(_NAMES)


def test_another_is_the_models_fault() -> None:
    with pytest.raises(UpstreamProtocolError, match="'glm5' is not known to this gateway"):
        chat_form("glm5")
