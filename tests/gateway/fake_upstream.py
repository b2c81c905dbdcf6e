"""A fake of the seam `gateway.core.upstream.Upstream`: answers by script, and remembers what it was asked."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable

from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Heartbeat,
    TokenLogprob,
    Usage,
)
from gateway.core.request import (
    Conversation,
    Generation,
    PlainText,
    TokenIds,
)
from gateway.core.upstream import Embedding, EntriesChanged, ModelCard, Tokenization, Tokens, Vector
from gateway.errors import InvalidRequestError, ModelNotFoundError
from gateway.settings import Settings

Script = Callable[[Generation], AsyncGenerator[Event, None]]
Tokenize = Callable[[Tokenization], Awaitable[Tokens]]


async def say(
    *texts: str, prompt_tokens: int = 3, gap_s: float = 0.0, finish: str = "stop"
) -> AsyncGenerator[Event, None]:
    """Answer with one delta of one token for each text."""
    yield Accepted(prompt_tokens=prompt_tokens)
    for number, text in enumerate(texts, 1):
        await asyncio.sleep(gap_s)
        last = number == len(texts)
        yield Delta(
            pieces=(text,) if text else (),
            tokens=1,
            finish_reason=finish if last else None,
            usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=number) if last else None,
        )


async def say_after(told: asyncio.Event) -> AsyncGenerator[Event, None]:
    """Accept, and answer with one delta once that is set."""
    yield Accepted(prompt_tokens=1)
    await told.wait()
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    yield Delta(pieces=("a",), tokens=1, finish_reason="stop", usage=usage)


async def say_once_loaded(
    loaded: asyncio.Event, *, error: Exception | None = None
) -> AsyncGenerator[Event, None]:
    """Load the model until that is set, then answer with one delta, or fail."""
    while not loaded.is_set():
        yield Heartbeat()
        await asyncio.sleep(0.01)
    if error is not None:
        raise error
    async for event in say("a"):
        yield event


async def say_and_hang(text: str) -> AsyncGenerator[Event, None]:
    """Begin an answer that does not go on."""
    yield Accepted(prompt_tokens=1)
    yield Delta(pieces=(text,), tokens=1)
    await asyncio.Event().wait()


async def say_choices(request: Generation) -> AsyncGenerator[Event, None]:
    """Answer each choice with `Hello <index>`, two tokens, in turns; the last choice is always ahead."""
    yield Accepted(prompt_tokens=3, prompt_token_ids=((8, 9, 8),) if request.return_token_ids else None)
    for index in reversed(range(request.n)):
        yield _word("Hello", index, request)
    for index in reversed(range(request.n)):
        usage = Usage(prompt_tokens=3, completion_tokens=2 * request.n)
        yield _word(f" {index}", index, request, finish="length" if index else "stop", usage=usage)


def _word(
    text: str, index: int, request: Generation, finish: str | None = None, usage: Usage | None = None
) -> Delta:
    logprob = TokenLogprob(id=7, token=text, utf8=text.encode(), logprob=-1.0 - index, top=())
    return Delta(
        pieces=(text,),
        tokens=1,
        index=index,
        token_ids=(index,) if request.return_token_ids else None,
        logprobs=None if request.logprobs is None else (logprob,),
        finish_reason=finish,
        usage=None if index else usage,
    )


async def by_code_point(request: Tokenization) -> Tokens:
    """Take each character for a token."""
    match request.prompt:
        case PlainText(text):
            pass
        case TokenIds(ids):
            if max(ids, default=0) > sys.maxunicode:
                raise InvalidRequestError("An id is not in the vocabulary.")
            text = "".join(map(chr, ids))
        case Conversation(messages):
            text = "".join(message.content for message in messages)
    return Tokens(ids=tuple(map(ord, text)), text=text, strings=tuple(text) if request.strings else None)


class FakeUpstream:
    """Serves `models` by `script`; `running` and `cancelled` count generations and tokenizations."""

    def __init__(self, script: Script | None = None, models: tuple[str, ...] = ("glm", "org/glm-2")) -> None:
        self.script = script or (lambda _request: say("Hello", " wor", "ld"))
        self.settings = Settings.model_validate({})
        """The gateway's, for what they say of models."""
        self.ready = True
        self.started = self.closed = False
        self.meeting = asyncio.Event()
        """Unset: whoever waits until a Triton has told what a model is goes on waiting."""
        self.awaited: list[str] = []
        """The models that are waited for so."""
        self.meeting.set()
        self.requests: list[Generation] = []
        self.tokenizing: Tokenize = by_code_point
        self.tokenizations: list[Tokenization] = []
        self.embeds = True
        self.embeddings: list[Embedding] = []
        self.running = self.cancelled = 0
        self.chat_format: str | None = "chatglm3"
        self.vocabulary: int | None = 5
        self.unloaded: set[str] = set()
        self.changes: list[tuple[str, str, bool, str | None]] = []
        """Of each load and unload: which, the model, whether to reload, the one upstream."""
        self._models = models

    async def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.running += 1
        try:
            async for event in self.script(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def tokenize(self, request: Tokenization) -> Tokens:
        self.tokenizations.append(request)
        self.running += 1
        try:
            return await self.tokenizing(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def embed(self, request: Embedding) -> Vector:
        """Return the text's length, and a half."""
        self.embeddings.append(request)
        if not self.embeds:
            raise InvalidRequestError("The model does not embed.", param="model")
        given = request.prompt.ids if isinstance(request.prompt, TokenIds) else request.prompt.text
        return Vector(values=[float(len(given)), 0.5], tokens=len(given))

    async def reached(self, deadline: float) -> None:
        pass

    async def met(self, model_id: str, deadline: float) -> None:
        self.awaited.append(model_id)
        try:
            await self.meeting.wait()
        finally:
            self.awaited.remove(model_id)

    def models(self) -> list[ModelCard]:
        return [
            ModelCard(
                id=name,
                ready=self.ready and name not in self.unloaded,
                created=1,
                max_context=64,
                unloaded=name in self.unloaded,
                chat_format=self.chat_format,
                vocabulary=self.vocabulary,
                settings=self.settings.model(name),
            )
            for name in self._models
        ]

    def model(self, model_id: str) -> ModelCard:
        for card in self.models():
            if card.id == model_id:
                return card
        raise ModelNotFoundError.of(model_id)

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        self.model(model_id)
        self.changes.append(("load", model_id, reload, upstream))
        self.unloaded.discard(model_id)
        return [EntriesChanged(upstream="triton:8001", entries=(model_id,))]

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        self.model(model_id)
        self.changes.append(("unload", model_id, False, upstream))
        self.unloaded.add(model_id)
        return [EntriesChanged(upstream="triton:8001", entries=())]

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True
