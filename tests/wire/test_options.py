import pytest

from wire.options import OPTIONS, Option


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_says_what_it_is(option: Option) -> None:
    assert option.flag == "--" + option.name.replace("_", "-")
    assert option.help.endswith(".")
    assert option.default_text.startswith(option.default)
    if option.gpu is not None:
        assert f"{option.gpu} on a GPU" in option.default_text
        assert option.parse(str(option.gpu)) == option.gpu
    if option.choices:
        assert all(choice in option.range_text for choice in option.choices)
        for choice in option.choices:
            assert option.parse(choice) == choice
