import pytest

from gateway.chat.styles import style_of


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><arg_key>", "glm45"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("role == 'ipython'", "llama3"),
        ("<|observation|>", "glm4"),
    ],
)
def test_templates_give_their_style_away(template: str, style: str) -> None:
    found = style_of(lambda mark: mark in template)
    assert found is not None
    assert found.name == style
    assert style_of(lambda _: False) is None
