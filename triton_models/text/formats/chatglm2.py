"""ChatGLM2's prompt: numbered rounds of question and answer in plain text.

Format: `build_prompt` of the published `modeling_chatglm.py`. It is plain text throughout, so a `[Round 2]`
typed by a user looks like a real one. This weakness of the format cannot be fixed here.
"""

from collections.abc import Sequence

from triton_models.errors import TextError
from triton_models.text.formats.base import ChatFormat, turn_error
from triton_models.text.tokenizers import Tokenizer
from wire.history import Turn

_QUESTION = "问\N{FULLWIDTH COLON}"
_ANSWER = "答\N{FULLWIDTH COLON}"


class ChatGLM2Format(ChatFormat):
    """Rounds of `[Round i]`, question and answer, separated by blank lines.

    A system turn, which must be the first turn, becomes part of the first question. Consecutive turns of one
    role form one question or answer, joined by blank lines. An answer without a question, such as a greeting,
    is given an empty question.
    """

    name = "chatglm2"

    def __init__(self, tokenizer: Tokenizer, _template: str | None = None) -> None:
        super().__init__(tokenizer, ("[gMASK]", "sop"), stop_ids=frozenset({tokenizer.eos_id}))

    def render_turns(  # noqa: D102 - inherited
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = True, answer_metadata: str | None = None
    ) -> list[int]:
        if answer_metadata is not None:
            raise TextError("a ChatGLM2 answer has no metadata")
        rounds = _rounds(turns)
        if add_generation_prompt and rounds and rounds[-1][1]:
            raise turn_error(turns, len(turns) - 1, "a ChatGLM2 conversation ends with a question")
        text = ""
        for number, (questions, answers) in enumerate(rounds, start=1):
            text += f"[Round {number}]\n\n{_QUESTION}{_joined(questions)}\n\n"
            if answers:
                text += f"{_ANSWER}{_joined(answers)}\n\n"
        if add_generation_prompt:
            text += _ANSWER
        return self._prefix + self._tokenizer.encode(text)


def _rounds(turns: Sequence[Turn]) -> list[tuple[list[str], list[str]]]:
    """Return the questions and the answers of each round."""
    rounds: list[tuple[list[str], list[str]]] = []
    for at, turn in enumerate(turns):
        if turn.role == "observation" or turn.metadata or turn.tools is not None:
            raise turn_error(turns, at, "ChatGLM2 has no tools")
        if turn.role == "system" and at > 0:
            raise turn_error(turns, at, "only the first turn can be the system's")
        if not rounds or (turn.role == "user" and rounds[-1][1]):
            rounds.append(([], []))
        rounds[-1][turn.role == "assistant"].append(turn.content)
    return rounds


def _joined(texts: list[str]) -> str:
    """Join with blank lines; an empty text adds none."""
    return "\n\n".join(filter(None, texts))
