"""`tritongate chat`: a conversation with a model in the terminal, over any OpenAI endpoint.

In a pipe it is plain: standard input is one question, standard output its answer and nothing else.
"""

import contextlib
import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from gateway.commands.endpoint import DEFAULT_URL, ClientError, events, fetch

_BLOCK: Final = '"""'
_HOTTEST: Final = 2.0
_HELP: Final = """\
/system TEXT       what the model is told to be; without TEXT: nothing
/model NAME        whom to ask from now on; without NAME: who is there
/temperature X     0 to 2; without X: the model's own
/save FILE         write the conversation
/load FILE         go on with one that was saved
/retry             ask the last question again
/clear             begin anew
/quit              or Ctrl-D
A line that ends with \\ goes on; lines between two of \"\"\" are one message. Ctrl-C stops an answer."""


@dataclass(slots=True)
class Conversation:
    """What a request is made from, and what `/save` writes."""

    model: str
    system: str | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    """Questions and answers in turn, without the system text."""

    def body(self) -> dict[str, Any]:
        """Return the request for the next answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        own = {} if self.temperature is None else {"temperature": self.temperature}
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **own,
        }

    @classmethod
    def read(cls, text: str | bytes) -> "Conversation":
        """Return the conversation that was saved as `text`.

        Raises:
            ClientError: it is none.
        """
        try:
            read = cls(**json.loads(text))
            typed = isinstance(read.model, str) and isinstance(read.system, str | None)
            typed = typed and isinstance(read.temperature, float | int | None)
            if typed and all(isinstance(each["role"] + each["content"], str) for each in read.messages):
                return read
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        raise ClientError("this is no conversation that /save has written")


class Chat:
    """Asks one endpoint, and shows what it answers.

    Args:
        url: of the endpoint.
        key: for it; None: it needs none.
        conversation: goes on from here.
    """

    def __init__(self, url: str, key: str | None, conversation: Conversation) -> None:
        self._url = url
        self._key = key
        self._conversation = conversation
        self._plain = not sys.stdout.isatty()

    def ask(self, question: str) -> None:
        """Show the answer to `question`, and keep both; a question that fails is forgotten.

        Raises:
            ClientError: the request failed.
            KeyboardInterrupt: it was stopped before anything of an answer came.
        """
        self._conversation.messages.append({"role": "user", "content": question})
        try:
            self.answer()
        except BaseException:
            self._conversation.messages.pop()
            raise

    def answer(self) -> None:
        """Show and keep an answer to the last question; of one that Ctrl-C stops, what there is of it."""
        began = time.monotonic()
        first: float | None = None
        text, thinking, usage = "", False, None
        chunks = events(self._url, self._key, "/v1/chat/completions", self._conversation.body())
        try:
            for chunk in chunks:
                usage = chunk.get("usage") or usage
                delta = chunk["choices"][0].get("delta", {}) if chunk.get("choices") else {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                content = delta.get("content")
                if reasoning or content:
                    first = first or time.monotonic()
                if reasoning and not self._plain:
                    click.secho(reasoning, dim=True, nl=False)
                    thinking = True
                if content:
                    click.echo("\n\n" * thinking + content, nl=False)
                    text, thinking = text + content, False
        except KeyboardInterrupt:
            if self._plain or not text:
                raise
            click.secho(" [stopped]", dim=True, nl=False)
        finally:
            chunks.close()  # hangs up
            if text or thinking:
                click.echo()
        self._conversation.messages.append({"role": "assistant", "content": text})
        if usage and first and not self._plain:
            tokens, waited_s = usage["completion_tokens"], time.monotonic() - began
            click.secho(
                f"{tokens} tokens, {tokens / waited_s:.0f} a second, the first after {first - began:.2f} s",
                dim=True,
            )

    def talk(self) -> None:
        """Read questions and commands from the terminal until it ends."""
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # editing and history of `input`
        click.secho(f"{self._conversation.model} at {self._url}; /help says what else there is", dim=True)
        while True:
            try:
                message = read_message()
                if message.startswith("/"):
                    self._command(message)
                elif message.strip():
                    self.ask(message)
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.secho("\nstopped; Ctrl-D ends", dim=True)
            except (ClientError, OSError, RuntimeError) as error:  # the last of a home that nobody has
                text = error.message if isinstance(error, ClientError) else str(error)
                click.secho(f"Error: {text}", fg="red")

    def _command(self, line: str) -> None:
        name, _, rest = line.removeprefix("/").partition(" ")
        commands = {
            "system": self._system,
            "model": self._model,
            "temperature": self._temperature,
            "save": self._save,
            "load": self._load,
            "retry": self._retry,
            "clear": lambda _: self._conversation.messages.clear(),
            "quit": self._quit,
        }
        commands.get(name, lambda _: click.echo(_HELP))(rest.strip())

    def _system(self, text: str) -> None:
        self._conversation.system = text or None

    def _model(self, name: str) -> None:
        names = models_at(self._url, self._key)
        if name:
            if name not in names:
                raise ClientError(f"there is no model {name}: /model lists those there are")
            self._conversation.model = name
            return
        for each in names:
            click.echo(f"{'*' if each == self._conversation.model else ' '} {each}")

    def _temperature(self, text: str) -> None:
        self._conversation.temperature = _temperature(text) if text else None

    def _save(self, name: str) -> None:
        text = json.dumps(asdict(self._conversation), ensure_ascii=False, indent=1) + "\n"
        Path(name).expanduser().write_text(text, encoding="utf-8")

    def _load(self, name: str) -> None:
        self._conversation = Conversation.read(Path(name).expanduser().read_bytes())
        for each in self._conversation.messages:
            click.echo(f"{'> ' if each['role'] == 'user' else ''}{each['content']}")

    def _retry(self, _: str) -> None:
        messages = self._conversation.messages
        if not messages:
            raise ClientError("nothing was asked yet")
        dropped = [messages.pop()] if messages[-1]["role"] == "assistant" else []
        try:
            self.answer()
        except BaseException:
            messages.extend(dropped)
            raise

    def _quit(self, _: str) -> None:
        raise EOFError


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _HOTTEST:
        raise ClientError(f"{text} is no temperature: 0 to 2")
    return value


def read_message() -> str:
    """Read a message from the terminal: a line, or several (see `/help`).

    Raises:
        EOFError: the terminal ended.
    """
    line = input("> ")
    if line.lstrip().startswith(_BLOCK):
        lines = [line.lstrip().removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(input("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)


def models_at(url: str, key: str | None) -> list[str]:
    """Return the names of the models that an endpoint lists.

    Raises:
        ClientError: it lists none, or cannot be asked.
    """
    try:
        names = [str(each["id"]) for each in fetch(url, key, "/v1/models")["data"]]
    except (LookupError, TypeError):
        names = []
    if not names:
        raise ClientError(f"{url} lists no models: name one with --model")
    return names


def _piped() -> str:
    """Return what a pipe has to ask; it is UTF-8, whatever the locale.

    Raises:
        ClientError: it is not.
    """
    try:
        return str(sys.stdin.buffer.read(), "utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ClientError(f"what the pipe asks is not UTF-8 at byte {error.start}") from None


@click.command(short_help="Talk to a model in the terminal.")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="of the gateway, or any OpenAI endpoint")
@click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key of the endpoint")
@click.option("--model", help="whom to ask  [default: the first that is listed]")
@click.option("--system", metavar="TEXT", help="what the model is told to be")
@click.option("--temperature", type=click.FloatRange(0, _HOTTEST), help="[default: the model's own]")
@click.option("-q", "question", metavar="TEXT", help="ask this once; without it, a pipe's text is asked")
def chat(*, url: str, key: str | None, question: str | None, model: str | None, **options: Any) -> None:
    """Talk to a model in the terminal; /help there says what else there is."""
    piped = question is None and not sys.stdin.isatty()
    request = _piped() if piped else question
    if request is not None and not request.strip():
        raise ClientError("there is nothing to ask")
    talk = Chat(url, key, Conversation(model or models_at(url, key)[0], **options))
    if request is None:
        talk.talk()
    else:
        talk.ask(request)
