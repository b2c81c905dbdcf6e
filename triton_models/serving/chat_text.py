"""The text side of one model: its tokenizer and its chat format, and what serving asks of them."""

from dataclasses import dataclass

from triton_models.errors import ModelError
from triton_models.text.answer import AnswerStream
from triton_models.text.formats import ChatFormat
from triton_models.text.tokenizers import Tokenizer
from wire.history import Turn
from wire.sampling import Generation


@dataclass(frozen=True, slots=True)
class ChatText:
    """A tokenizer and a format that belong together."""

    tokenizer: Tokenizer
    format: ChatFormat

    def prompt_ids(self, generation: Generation, prompt: str, history: list[Turn]) -> list[int]:
        """Return the ids to prefill, rendered from the conversation or text, or as the client gave them.

        Raises:
            ModelError: the format cannot express it, or it is two things at once.
        """
        if generation.answer_metadata is not None and (generation.raw or generation.prompt_token_ids):
            raise ModelError("answer_metadata belongs to a conversation, not to raw text or ids")
        if generation.prompt_token_ids is not None:
            return generation.prompt_token_ids
        if not generation.raw:
            return self.format.render(
                history, prompt, generation.role, answer_metadata=generation.answer_metadata
            )
        if history or generation.role != "user":
            raise ModelError("raw excludes history and role")
        return self.format.render_text(prompt)

    def echo(self, generation: Generation, prompt: str, ids: list[int], stream: AnswerStream) -> str:
        """Return the prompt's text for the front of the answer that `stream` makes; empty without echo.

        Text is repeated as it was given, ids by what they decode to, special ones left out.

        Raises:
            ModelError: the prompt is a conversation.
        """
        if not generation.echo:
            return ""
        if generation.prompt_token_ids is not None:
            return stream.echo(ids)
        if not generation.raw:
            raise ModelError("echo belongs to raw text or ids, not to a conversation")
        return prompt

    def stop_ids(self, generation: Generation) -> frozenset[int]:
        """Return the ids that end the answer: the format's unless ignored, and the request's own."""
        own = frozenset(generation.stop_token_ids)
        return own if generation.ignore_eos else own | self.format.stop_ids

    def answer(self, generation: Generation) -> AnswerStream:
        """Return a new stream from token ids to text.

        Raises:
            ModelError: it is to find calls, and what tells them from text is to be text.
        """
        if generation.show_special and generation.end_after_call_of:
            raise ModelError("show_special excludes end_after_call_of")
        return AnswerStream(
            self.tokenizer,
            self.format,
            generation.stop,
            generation.min_tokens,
            raw=generation.raw,
            metadata=generation.answer_metadata,
            end_after_call_of=generation.end_after_call_of,
            include_stop=generation.include_stop,
            show_special=generation.show_special,
            echoes=generation.echo and generation.prompt_token_ids is not None,
        )
