import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

from gateway.cli import main
from gateway.commands.models import models_of, prompt_of, show, table
from gateway.errors import ModelNotFoundError
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import on_socket, settings
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton

ASK = [{"role": "user", "name": "ann", "content": "hi"}]
NOWHERE = "127.0.0.1:1"
UNKNOWN = "Request for unknown model: 'gone' has no available versions"


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    words = {token: id_ for id_, token in enumerate(map(chr, range(32, 127)))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    return str(tmp_path)


async def test_every_name_has_a_row() -> None:
    triton = FakeTriton()
    await triton.start()
    try:
        given = {"glm": {"entry": "m", "aliases": ["a", "b"]}, "gone": {}}
        rows = await models_of(settings(upstreams=[triton.address], models=given), timeout_s=10)
    finally:
        await triton.stop()
    assert [line.split(maxsplit=7) for line in table(rows).splitlines()] == [
        ["model", "aliases", "entry", "upstreams", "dialect", "state", "context", "reason"],
        ["glm", "a,b", "m", triton.address, "chatglm", "ready", "512", "-"],
        ["gone", "-", "gone", triton.address, "-", "not_ready", "-", UNKNOWN],
    ]


async def test_what_is_left_out_has_a_row_with_its_reason() -> None:
    triton = FakeTriton()
    triton.models = {"api": FakeModel(inputs=("text_input", "sampling_param_max_tokens"))}
    await triton.start()
    try:
        (row,) = await models_of(settings(upstreams=[triton.address]), timeout_s=3)
    finally:
        await triton.stop()
    assert (row["model"], row["state"]) == ("api", "left_out")
    assert row["reason"] == "it counts no tokens: set tokenizers to api=FOLDER"


@pytest.mark.parametrize("command", [("check",), ("models",), ("prompt", "--model", "m")])
def test_what_is_found_is_said_once(command: tuple[str, ...]) -> None:
    """Lines of the log stood between: `replica is unreachable`, of no model."""
    flags = ["--models", "m", "--upstreams", NOWHERE, "--timeout-s", "1"]
    program = "from gateway.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *command, *flags],
        input=json.dumps(ASK), capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "replica is" not in said
    assert command[0] == "prompt" or "connection refused" in said


async def test_a_prompt_is_rendered_here_where_no_triton_is(tokenizer: str) -> None:
    models: dict[str, Any] = {"q": {"tokenizer": tokenizer, "system": "Hm.", "aliases": ["r"]}}
    tokens = await prompt_of(settings(upstreams=[NOWHERE], models=models), "r", ASK, timeout_s=0.2)
    text = "[system]Hm.[user]hi"
    assert show(tokens) == f"{text}\n\n{len(text)} tokens: {' '.join(str(ord(each) - 32) for each in text)}"
    with pytest.raises(ModelNotFoundError):
        await prompt_of(settings(upstreams=[NOWHERE], models=models), "s", ASK, timeout_s=0.2)


@pytest.mark.parametrize("away", [True, False])
async def test_a_prompt_has_what_its_template_reads(tokenizer: str, away: bool) -> None:
    template = "{% for each in messages %}({{ each.reasoning }}){{ each.content }}{% endfor %}{{ quiet }}"
    (Path(tokenizer) / "chat_template.jinja").write_text(template)
    answer = {"role": "assistant", "content": "yes", "reasoning": "Hm."}
    body = {"messages": [*ASK, answer, *ASK], "chat_template_kwargs": {"quiet": "sh", "other": 1}}
    triton = FakeTriton()
    triton.models = {"q": FakeModel(inputs=("text_input", "sampling_parameters"))}
    await triton.start()
    try:
        models: dict[str, Any] = {"q": {"tokenizer": tokenizer}}
        given = settings(upstreams=[NOWHERE if away else triton.address], models=models)
        tokens = await prompt_of(given, "q", body, timeout_s=0.2 if away else 10)
    finally:
        await triton.stop()
    assert show(tokens).startswith("()hi(Hm.)yes()hish\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "the messages are not valid JSON"),
        ("{", "The body is not valid JSON"),
        ('[{"role": "user",}]', "not valid JSON: "),
        (b"\xff\xfe", "it is not UTF-8 at byte 0"),
        (b"[\xff]", "it is not UTF-8 at byte 1"),
        (b"\xef\xbb\xbf[]", "messages: Array should have at least 1 item"),
        ("3", "The body must be a JSON object"),
        pytest.param("[" * 100_000, "the messages are nested too deeply", id="deep"),
        ('[{"role": "nobody"}]', "messages.0.role"),
        (json.dumps(ASK), "the model"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(text: str | bytes, told: str) -> None:
    flags = ["--model", "q", "--models", "q", "--upstreams", NOWHERE, "--timeout-s", "0.2"]
    done = CliRunner().invoke(main, ["prompt", *flags], input=text)
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert told.lower() in done.output.lower()
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", [("models",), ("prompt", "--model", "q")])
def test_without_any_model_the_next_step_is_named(command: tuple[str, ...]) -> None:
    """`models` said nothing, and `prompt` that there is no such model, where Triton is away."""
    flags = ["--upstreams", NOWHERE, "--timeout-s", "0.2"]
    done = CliRunner().invoke(main, [*command, *flags], input=json.dumps(ASK))
    assert (done.exit_code, done.output) == (
        1,
        "Error: no model was found; `tritongate check` says what is at each upstream\n",
    )


@pytest.mark.parametrize("named", [("--url",), ()])
async def test_a_running_gateway_is_asked(named: tuple[str, ...]) -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream, models={"glm": {"aliases": ["gpt"]}, "org/glm-2": {}}) as served:
        url = str(served.http.base_url)
        done = await asyncio.to_thread(CliRunner().invoke, main, ["models", *named, url])
    assert [line.split() for line in done.output.splitlines()] == [
        ["model", "aliases", "state", "context"],
        ["glm", "gpt", "ready", "64"],
        ["org/glm-2", "-", "ready", "64"],
    ]


@pytest.mark.parametrize("listed", [{"data": [{"id": "m", "root": "/models/m"}]}, {}])
def test_an_endpoint_that_is_no_gateway_is_told(listed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.commands.models.fetch", lambda *_: listed)
    done = CliRunner().invoke(main, ["models", "http://endpoint"])
    assert done.output == "Error: http://endpoint does not tell of its models as a gateway does\n"


def test_a_gateway_without_models_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.commands.models.fetch", lambda *_: {"data": []})
    done = CliRunner().invoke(main, ["models", "http://gateway"])
    assert (done.exit_code, done.output) == (1, "Error: http://gateway lists no models\n")
