"""ChatGLM3's prompt: tagged turns, with the tools after the system turn's own text.

Format: `build_chat_input` of the published `tokenization_chatglm.py`.
"""

from typing import Any, Final

from triton_models.text.formats.tagged_turns import TaggedTurnsFormat, indented
from triton_models.text.tokenizers import Tokenizer


class ChatGLM3Format(TaggedTurnsFormat):
    """See the module."""

    name: Final = "chatglm3"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, "sop")

    def _with_tools(self, content: str, tools: list[dict[str, Any]]) -> list[str]:
        return [content + "\n" + indented(tools)]
