"""ChatGLM3's prompt, whose turns begin with special ids: no text can pass for the turn of another role.

Format: `build_single_message` and `build_chat_input` of the published `tokenization_chatglm.py`. A turn, for
GLM-4 as well, is its role's id, then the metadata and a newline, then the content. The metadata line and the
content are tokenized separately.
"""

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, Final

from triton_models.errors import TextError
from triton_models.text.call_grammar import FENCED_CALLS
from triton_models.text.formats.base import ChatFormat, turn_error
from triton_models.text.tokenizers import Tokenizer
from wire.history import Role, Turn

LONGEST_TOOLS: Final = 2**20
"""Limit on the characters that describe tools in the prompt, more than any context holds. Indentation turns a
few nested brackets into thousands of characters, so a limit on the client's document would not be enough."""

_TOOLS_ENCODER = json.JSONEncoder(indent=4, ensure_ascii=False)


class TaggedTurnsFormat(ChatFormat):
    """System (only as the first), user, assistant and observation turns; the system turn may offer tools.

    Args:
        tokenizer: writes the turns.
        prefix: the names of the special ids with which every prompt begins.
    """

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[str]) -> None:
        special = tokenizer.special_ids
        self._roles: dict[Role, int] = {
            "system": special["<|system|>"],
            "user": special["<|user|>"],
            "assistant": special["<|assistant|>"],
            "observation": special["<|observation|>"],
        }
        super().__init__(
            tokenizer,
            prefix,
            stop_ids=frozenset({tokenizer.eos_id, self._roles["user"], self._roles["observation"]}),
            segment_roles=MappingProxyType({self._roles["assistant"]: "assistant"}),
        )

    def render_turns(  # noqa: D102 - inherited
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = True, answer_metadata: str | None = None
    ) -> list[int]:
        ids = list(self._prefix)
        for at, turn in enumerate(turns):
            if turn.role == "system" and at > 0:
                raise turn_error(turns, at, "only the first turn can be the system's")
            if turn.tools is not None and turn.role != "system":
                raise turn_error(turns, at, "only a system turn can offer tools")
            if "\n" in turn.metadata:
                raise turn_error(turns, at, "metadata is a single line")
            contents = [turn.content] if turn.tools is None else self._with_tools(turn.content, turn.tools)
            for content in contents:
                ids.append(self._roles[turn.role])
                ids += self._metadata(turn.metadata)
                ids += self._tokenizer.encode(content)
        if add_generation_prompt:
            ids.append(self._roles["assistant"])
            if answer_metadata is not None:
                ids += self._metadata(answer_metadata)
        return ids

    @abstractmethod
    def _with_tools(self, content: str, tools: list[dict[str, Any]]) -> Iterable[str]:
        """Return the contents of the prompt's turns for a system turn with `content` that offers `tools`.

        Raises:
            TextError: the tools are too long.
        """

    def _metadata(self, metadata: str) -> list[int]:
        return self._tokenizer.encode(metadata + "\n")


def indented(document: Any, *, longest: int = LONGEST_TOOLS) -> str:
    """Return one tool or all tools as JSON, indented as in the prompt.

    Raises:
        TextError: the JSON is longer than `longest` characters.
    """
    parts: list[str] = []
    left = longest
    for part in _TOOLS_ENCODER.iterencode(document):
        left -= len(part)
        if left < 0:
            raise TextError(f"the tools come to more than {LONGEST_TOOLS} characters in the prompt")
        parts.append(part)
    return "".join(parts)


class ChatGLM3Format(TaggedTurnsFormat):
    """Tagged turns, with the tools after the system turn's own text."""

    name = "chatglm3"
    call_syntax = FENCED_CALLS

    def __init__(self, tokenizer: Tokenizer, _template: str | None = None) -> None:
        super().__init__(tokenizer, ("[gMASK]", "sop"))

    def _with_tools(self, content: str, tools: list[dict[str, Any]]) -> list[str]:
        return [content + "\n" + indented(tools)]
