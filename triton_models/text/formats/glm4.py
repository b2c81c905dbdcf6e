"""GLM-4's prompt: tagged turns; tools are described in a separate system turn, in the format's wording.

Format: `chat_template` of the published `tokenizer_config.json`. The text of the conversation's own system
turn, if any, follows as another system turn.
"""

from typing import Any, Final

from triton_models.text.call_grammar import JSON_CALLS
from triton_models.text.formats.chatglm3 import LONGEST_TOOLS, TaggedTurnsFormat, indented
from triton_models.text.tokenizers import Tokenizer

INTRODUCTION: Final = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。"
)
"""The text before the tools, unless the checkpoint's template has another."""

_TITLE: Final = "\n\n# 可用工具"
_AFTER_TOOL: Final = "\n在调用上述函数时，请使用 Json 格式表示调用的参数。"


class GLM4Format(TaggedTurnsFormat):
    """Tagged turns, with the tools in a system turn of their own.

    Args:
        tokenizer: writes the turns.
        template: the checkpoint's `chat_template`. The model's introduction, which differs between its
            revisions, is taken from it; nothing of it is run.
    """

    name = "glm4"
    call_syntax = JSON_CALLS

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        super().__init__(tokenizer, ("[gMASK]", "<sop>"))
        self._introduction = _introduction(template or "")

    def _with_tools(self, content: str, tools: list[dict[str, Any]]) -> list[str]:
        text = self._introduction + _TITLE
        left = LONGEST_TOOLS
        for tool in tools:
            described = indented(tool, longest=left)
            left -= len(described)
            text += f"\n\n## {tool.get('name', '')}\n\n{described}{_AFTER_TOOL}"
        return [text, content] if content else [text]


def _introduction(template: str) -> str:
    before, title, _ = template.partition(_TITLE)
    _, tag, introduction = before.rpartition("<|system|>\n")
    return introduction if title and tag and "{" not in introduction else INTRODUCTION
