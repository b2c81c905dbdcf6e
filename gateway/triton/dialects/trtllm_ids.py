"""TensorRT-LLM's inner `tensorrt_llm` model: token ids in, token ids out, batched tensors.

Source of the contract: https://github.com/NVIDIA/TensorRT-LLM,
`triton_backend/all_models/inflight_batcher_llm/tensorrt_llm`. The gateway's tokenizer makes the ids and reads
them. Without beams a streamed response has the new ids only. There is no finish reason: an answer as long as
its limit ended by it. The id that ends an answer is not in it, but the ids of stop words are.
Log-probabilities are those of the answer's own ids: of the new ones, or, in other releases, of all so far.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from gateway.chat.vocabulary import Vocabulary
from gateway.core.events import Accepted, Delta, Event, TokenLogprob
from gateway.core.request import Generation, TokenIds
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects import trtllm
from gateway.triton.dialects.base import Request, Response
from gateway.triton.dialects.foreign import Contract
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import Tensors, outputs
from gateway.triton.dialects.text_answer import News, TextAnswer, limit_of

_SUPPORTED: Final = (
    *trtllm.NUMBERS, "max_tokens", "stop", "stop_token_ids", "bad_words", "include_stop", "ignore_eos",
    "show_special", "return_token_ids", "logprobs", "truncate_prompt_tokens", "priority",
)  # fmt: skip
_WHAT_HAS_ROOM: Final = -1
"""As `truncate_prompt_tokens`: as many as fit in the context."""


def _prompt(generation: Generation, _inputs: Collection[str], model: ModelText) -> RenderedPrompt:
    prompt, kept = generation.prompt, generation.truncate_prompt_tokens
    if kept == _WHAT_HAS_ROOM:
        raise InvalidRequestError(
            "The gateway does not know this model's context: say how many tokens to keep.",
            param="truncate_prompt_tokens",
        )
    if isinstance(prompt, TokenIds):
        rendered = RenderedPrompt("", ids=tuple(prompt.ids))
    else:
        rendered = model.encoded(prompt, generation.prompt_field)
    ids = rendered.ids[-kept:] if kept else rendered.ids
    if generation.echo and (ids != rendered.ids or isinstance(prompt, TokenIds)):
        rendered = replace(rendered, text=model.required_vocabulary().decode(ids))
    return replace(rendered, ids=ids, tokens=len(ids))


def _write(
    generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], model: ModelText
) -> Request:
    message = Request(model_name=generation.model, id=generation.request_id)
    tensors, vocabulary = Tensors(message, inputs, batched=True), model.required_vocabulary()
    tensors.numbers("input_ids", "INT32", *prompt.ids, param=generation.prompt_field or "prompt")
    tensors.numbers("input_lengths", "INT32", len(prompt.ids))
    tensors.numbers("request_output_len", "INT32", limit_of(generation), param="max_tokens")
    tensors.numbers("beam_width", "INT32", 1)
    tensors.numbers("streaming", "BOOL", generation.stream)
    tensors.flags("exclude_input_in_output")
    for end in [trtllm.NO_END] if generation.ignore_eos else vocabulary.ends[:1]:
        tensors.numbers("end_id", "INT32", end)
    if vocabulary.pad is not None:
        tensors.numbers("pad_id", "INT32", vocabulary.pad)
    tensors.parameters(generation, trtllm.NUMBERS, trtllm.names_of, seeded=True)
    # Both end an answer early; where they did is found here, as other ids may read the same.
    stops = [*([] if generation.ignore_eos else vocabulary.ends[1:]), *generation.stop_token_ids]
    strings = [
        ids for ids in _words(vocabulary, generation.stop) if vocabulary.decode(ids) in generation.stop
    ]
    if words := [*([each] for each in stops), *strings]:
        tensors.words("stop_words_list", words, param="stop_token_ids")
    if generation.bad_words:
        forms = [form for word in generation.bad_words for form in (word, " " + word)]
        if not tensors.words("bad_words_list", _words(vocabulary, forms), param="bad_words"):
            raise InvalidRequestError("The model's backend does not have 'bad_words'.", param="bad_words")
    if generation.grammar is not None:
        trtllm.constrain(tensors, generation.grammar)
    if generation.logprobs:
        raise InvalidRequestError(
            "The model's backend has log-probabilities of the answer's own tokens, and of no others.",
            param="top_logprobs",
        )
    if generation.logprobs is not None and not tensors.flags("return_log_probs"):
        raise InvalidRequestError("The model's backend has no log-probabilities.", param="logprobs")
    return message


def _words(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    return [ids for text in texts if (ids := vocabulary.encode(text, rendered=True))]


class _Answer(TextAnswer):
    """Reads responses: each has more ids."""

    def __init__(
        self, generation: Generation, prompt: RenderedPrompt, inputs: Collection[str], model: ModelText
    ) -> None:
        vocabulary = model.required_vocabulary()
        super().__init__(generation, model, prompt, cut_stops=True, limit=limit_of(generation))
        before = () if prompt.converses else prompt.ids[-1:]
        self._text = vocabulary.stream(before, special=generation.show_special)
        self._ends = set() if generation.ignore_eos else set(vocabulary.ends)
        self._stop_ids = set(generation.stop_token_ids)
        self._stopped_by_id: int | None = None
        """The request's stop id that the answer came to."""
        self._generated = 0
        """How many ids came."""
        self._repeats = not generation.stream and "exclude_input_in_output" not in inputs
        """Whether the ids may begin with the prompt's: the model's configuration says so, not the request."""

    def decode(self, response: Response) -> list[Event]:
        found = outputs(response)
        lengths = found.get("sequence_length", [])
        ids = tuple(found.get("output_ids", [])[: lengths[0] if lengths else None])
        prompt = self._prompt.ids
        if self._repeats and ids[: len(prompt)] == prompt:
            ids = ids[len(prompt) :]
        return [*self.accept(), *self._take(ids, found.get("output_log_probs", ()))]

    def end(self) -> list[Event]:
        events = [*self.accept(), *self.rest(self._text.end()), *super().end()]
        if isinstance(last := events[-1], Delta) and last.stop_reason is None:
            events[-1] = structs.replace(last, stop_reason=self._stopped_by_id)
        return events

    def accept(self, prompt_tokens: int | None = None) -> list[Event]:
        """See `TextAnswer.accept`; with the prompt's ids, if requested."""
        events, ids = super().accept(prompt_tokens), self._prompt.ids
        if events and self._generation.return_token_ids:
            events[0] = Accepted(prompt_tokens=len(ids), prompt_token_ids=(ids,))
        return events

    def _take(self, ids: tuple[int, ...], probabilities: Sequence[float]) -> list[Event]:
        probabilities = self._new(probabilities, len(ids))
        stop = next((id_ for id_ in ids if id_ in self._stop_ids or id_ in self._ends), None)
        shown = ids
        if stop is not None:
            at = ids.index(stop)
            ids, shown = ids[: at + 1], ids[: at + self._generation.include_stop]
        texts = [self._text.push([id_]) for id_ in shown]
        news = News(
            text="".join(texts) + (self._text.end() if stop is not None else ""),
            tokens=len(ids),
            finish=None if stop is None else "stop",
            logprobs=tuple(map(_logprob, shown, texts, probabilities)),
        )
        events = self.take(news)
        if stop in self._stop_ids and events:
            self._stopped_by_id = stop
        if self._generation.return_token_ids and events and isinstance(last := events[-1], Delta):
            events[-1] = structs.replace(last, token_ids=ids)
        return events

    def _new(self, probabilities: Sequence[float], count: int) -> Sequence[float]:
        """Return the log-probabilities of the newest `count` ids, if they were requested.

        Raises:
            UpstreamProtocolError: the backend told too few.
        """
        before, self._generated = self._generated, self._generated + count
        if self._generation.logprobs is None:
            return ()
        if len(probabilities) < count:
            raise UpstreamProtocolError("The model's backend left out log-probabilities.")
        start = before if len(probabilities) >= self._generated else 0
        return probabilities[start : start + count]


def _logprob(id_: int, text: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(id=id_, token=text, utf8=text.encode(), logprob=logprob, top=())


CONTRACT: Final = Contract(
    inputs=frozenset({"input_ids", "input_lengths", "request_output_len"}),
    supported=_SUPPORTED,
    write=_write,
    answer=_Answer,
    prompt=_prompt,
    ids=True,
)
