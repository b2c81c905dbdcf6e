"""ChatGLM2's prompt: numbered rounds of question and answer in plain text.

Format: `build_prompt` of the published `modeling_chatglm.py`. It is plain text throughout, so a `[Round 2]`
typed by a user looks like a real one. This weakness of the format cannot be fixed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from triton_models.errors import TextError
from triton_models.text.formats.base import ChatFormat, refuse
from triton_models.text.tokenizers import Tokenizer
from wire.history import Turn

_QUESTION = "问\N{FULLWIDTH COLON}"
_ANSWER = "答\N{FULLWIDTH COLON}"
_BLANK_LINE = "\n\n"


@dataclass(slots=True)
class _Round:
    """A question and its answer, each in one or more turns."""

    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


class ChatGLM2Format(ChatFormat):
    """Rounds of `[Round i]`, question and answer, separated by blank lines.

    A system turn, which must be the first turn, becomes part of the first question. Consecutive turns of one
    role form one question or answer, joined by blank lines. An answer without a question, such as a greeting,
    is given an empty question.
    """

    name: Final = "chatglm2"
    supports_tools: Final = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(
            tokenizer, "sop", stop_ids=frozenset({tokenizer.eos_id}), segment_roles=MappingProxyType({})
        )

    def render_turns(
        self,
        turns: Sequence[Turn],
        *,
        add_generation_prompt: bool = True,
        answer_metadata: str | None = None,
    ) -> list[int]:
        """See `ChatFormat.render_turns`."""
        if answer_metadata is not None:
            raise TextError("a ChatGLM2 answer has no metadata")
        rounds = _rounds(turns)
        if add_generation_prompt and rounds and rounds[-1].answers:
            raise refuse(turns, len(turns) - 1, "a ChatGLM2 conversation ends with a question")
        text = "".join(_round_text(number, each) for number, each in enumerate(rounds, start=1))
        if add_generation_prompt:
            text += _ANSWER
        return self._prefix + self._tokenizer.encode(text)


def _rounds(turns: Sequence[Turn]) -> list[_Round]:
    rounds: list[_Round] = []
    for at, turn in enumerate(turns):
        if turn.role == "observation" or turn.metadata or turn.tools is not None:
            raise refuse(turns, at, "ChatGLM2 has no tools")
        if turn.role == "system" and at > 0:
            raise refuse(turns, at, "only the first turn can be the system's")
        if not rounds or (turn.role == "user" and rounds[-1].answers):
            rounds.append(_Round())
        (rounds[-1].answers if turn.role == "assistant" else rounds[-1].questions).append(turn.content)
    return rounds


def _round_text(number: int, each: _Round) -> str:
    asked = f"[Round {number}]\n\n{_QUESTION}{_join(each.questions)}\n\n"
    return asked + f"{_ANSWER}{_join(each.answers)}\n\n" if each.answers else asked


def _join(texts: list[str]) -> str:
    """Join with blank lines; an empty text adds none."""
    return _BLANK_LINE.join(text for text in texts if text)
