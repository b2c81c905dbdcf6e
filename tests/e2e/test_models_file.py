"""A models file in front of the real Triton: public names, what is set for them, and changes under load."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from click.testing import CliRunner

from gateway.cli import main
from tests.e2e.foreign_server import Foreign, write_tokenizer
from tests.e2e.serve_process import ServeProcess
from tests.e2e.stock_server import StockServer
from tests.e2e.test_foreign_models import say
from tests.e2e.up_process import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

KEYS = [{"name": "ann", "key": "of-ann"}, {"name": "bob", "key": "of-bob"}]
ASK = [{"role": "user", "content": "Who are you?"}]
TEXT = "So much to say, " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("models_file")
    write_tokenizer(made / "tokenizer")
    return made


@pytest.fixture(scope="module")
def server(foreign: Foreign) -> StockServer:
    return foreign.server


def document(folder: Path) -> dict[str, Any]:
    one: dict[str, Any] = {"entry": "vllm", "dialect": "vllm", "tokenizer": str(folder / "tokenizer")}
    return {
        "plain": one
        | {"aliases": ["gpt-4o"], "limits": {"max_tokens": 200, "n": 2, "max_prompt_tokens": 50}},
        "brief": one | {"system": "SAY:I am brief.", "defaults": {"max_tokens": 2}, "stop": "many"},
        "secret": one | {"keys": ["ann"]},
    }


def write(folder: Path, models: Any) -> None:
    """Replace the file as a whole, as careful programs do."""
    (folder / "new.yaml").write_text(yaml.safe_dump({"models": models}, sort_keys=False))
    (folder / "new.yaml").replace(folder / "models.yaml")


@pytest.fixture(scope="module")
def gateway(folder: Path, server: StockServer) -> Iterator[ServeProcess]:
    write(folder, document(folder))
    gateway = ServeProcess(
        server.grpc,
        "--models-file",
        str(folder / "models.yaml"),
        TRITONGATE_API_KEYS=json.dumps(KEYS),
    )
    yield gateway
    gateway.close()


@asynccontextmanager
async def client(gateway: ServeProcess, key: str = "of-bob") -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.sdk() as sdk:
        yield sdk.with_options(api_key=key)


async def test_names_of_one_entry_differ_in_what_is_set(gateway: ServeProcess) -> None:
    async with client(gateway) as sdk:
        brief = await sdk.chat.completions.create(model="brief", messages=ASK)
        assert brief.choices[0].message.content == "I am b"  # two tokens of three characters
        assert brief.choices[0].finish_reason == "length"
        more = await sdk.chat.completions.create(model="brief", messages=say("Not so many"), max_tokens=9)
        assert (more.choices[0].message.content, more.choices[0].finish_reason) == ("Not so ", "stop")
        plain = await sdk.chat.completions.create(model="gpt-4o", messages=say("Not so many"))
        assert plain.choices[0].message.content == "Not so many"
        assert plain.model == "gpt-4o"
        own = [{"role": "system", "content": "SAY:mine"}, *ASK]
        kept = await sdk.chat.completions.create(model="brief", messages=own, max_tokens=9)
        assert kept.choices[0].message.content == "mine"
    assert gateway.gauge("tritongate_requests_total", model="plain", status="200") == 1
    assert gateway.gauge("tritongate_requests_total", model="brief", status="200") == 3
    assert gateway.gauge("tritongate_upstream_healthy", model="secret") == 1


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_completion_tokens": 201}, "max_completion_tokens"),
        ({"n": 3}, "n"),
        ({"messages": say("x" * 200)}, "messages"),
    ],
)
async def test_limits_are_a_400(gateway: ServeProcess, asked: Any, param: str) -> None:
    async with client(gateway) as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**{"model": "plain", "messages": ASK} | asked)
        assert caught.value.param == param
        assert "allows" in caught.value.message


async def test_a_model_that_is_for_another_key_does_not_exist(gateway: ServeProcess) -> None:
    names = {}
    for key in ("of-ann", "of-bob"):
        async with client(gateway, key) as sdk:
            names[key] = [(each.id, getattr(each, "root", None)) async for each in sdk.models.list()]
            if key == "of-bob":
                with pytest.raises(openai.NotFoundError, match="The model 'secret' does not exist"):
                    await sdk.chat.completions.create(model="secret", messages=ASK)
            else:
                answer = await sdk.chat.completions.create(model="secret", messages=say("Hi"))
                assert answer.choices[0].message.content == "Hi"
    shown = [("plain", None), ("gpt-4o", "plain"), ("brief", None)]
    assert names == {"of-ann": [*shown, ("secret", None)], "of-bob": shown}
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as http:
        assert (await http.get("/health/ready")).json()["models"] == ["plain", "brief"]
        for key, status in (("of-ann", 200), ("of-bob", 404)):
            found = await http.get("/v2/models/secret", headers={"Authorization": f"Bearer {key}"})
            assert found.status_code == status


def reloads(gateway: ServeProcess, outcome: str) -> float:
    return gateway.gauge("tritongate_models_file_reloads_total", outcome=outcome)


async def changed(gateway: ServeProcess, folder: Path, models: dict[str, Any]) -> None:
    """Write the file, which says something else now, and wait until that is served."""
    applied = reloads(gateway, "applied")
    await asyncio.to_thread(write, folder, models)
    await asyncio.to_thread(wait_until, lambda: reloads(gateway, "applied") == applied + 1)


async def test_no_stream_is_lost_while_the_file_changes(gateway: ServeProcess, folder: Path) -> None:
    over = asyncio.Event()
    ended = spanning = 0

    async def ask(sdk: openai.AsyncOpenAI) -> None:
        nonlocal ended, spanning
        while not over.is_set():
            at, text, reason = changes, "", None
            stream = await sdk.chat.completions.create(model="gpt-4o", messages=say(TEXT), stream=True)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            assert (text, reason) == (TEXT.rstrip("\n"), "stop")
            ended += 1
            spanning += at != changes

    changes = 0
    await changed(gateway, folder, document(folder) | {"plain": {**document(folder)["plain"], "limits": {}}})
    refused = reloads(gateway, "refused")
    async with client(gateway) as sdk:
        asking = [asyncio.create_task(ask(sdk)) for _ in range(32)]
        for change in range(5):
            # Every other time there is another entry, and so another pool.
            other = {"other": {"entry": "llmapi", "tokenizer": str(folder / "tokenizer")}}
            now = document(folder) | ({} if change % 2 else other)
            now["plain"] = now["plain"] | {"limits": {"n": change + 1}}
            await changed(gateway, folder, now)
            changes += 1
            listed = [each.id async for each in sdk.models.list()]
            assert ("other" in listed) == (change % 2 == 0)
        over.set()
        await asyncio.gather(*asking)
    assert ended >= 32
    assert spanning
    assert reloads(gateway, "refused") == refused
    await changed(gateway, folder, document(folder))


async def test_a_bad_file_changes_nothing(gateway: ServeProcess, folder: Path) -> None:
    refused = reloads(gateway, "refused")
    bad = document(folder) | {"plain": {"entry": "vllm", "dialect": "vlm", "tempo": 1}}
    write(folder, bad)
    await asyncio.to_thread(wait_until, lambda: reloads(gateway, "refused") == refused + 1)
    async with client(gateway) as sdk:
        answer = await sdk.chat.completions.create(model="gpt-4o", messages=say("Hello"))
        assert answer.choices[0].message.content == "Hello"
    for fault in ("models.plain.dialect: 'vlm' is no dialect", "models.plain.tempo: unknown key"):
        await asyncio.to_thread(wait_until, lambda: fault in gateway.output)  # noqa: B023 - awaited
    await changed(gateway, folder, document(folder) | {"plain": {**document(folder)["plain"], "limits": {}}})
    await changed(gateway, folder, document(folder))


def run(*arguments: str) -> tuple[int, str]:
    # A gateway in this process, whose settings the tests of others must not see.
    variables = {"TRITONGATE_API_KEYS": json.dumps(KEYS)}
    done = CliRunner().invoke(main, list(arguments), env={**os.environ, **variables})
    return done.exit_code, done.output


def test_the_commands_tell_of_every_name(gateway: ServeProcess, server: StockServer, folder: Path) -> None:
    flags = ["--upstreams", server.grpc, "--models-file", str(folder / "models.yaml")]
    status, text = run("models", *flags)
    assert status == 0
    rows = [line.split() for line in text.splitlines()]
    assert rows[1] == ["plain", "gpt-4o", "vllm", server.grpc, "vllm", "ready", "-", "-"]
    assert [row[0] for row in rows] == ["model", "plain", "brief", "secret"]
    status, text = run("models", gateway.base_url, "--key", "of-bob")
    assert [line.split() for line in text.splitlines()] == [
        ["model", "aliases", "state", "context"],
        ["plain", "gpt-4o", "ready", "-"],
        ["brief", "-", "ready", "-"],
    ]
    messages = folder / "messages.json"
    messages.write_text(json.dumps(ASK))
    prompt = "<|system|>SAY:I am brief.\n<|user|>Who are you?\n<|assistant|>"
    status, text = run("prompt", "--model", "brief", *flags, str(messages))
    assert (status, text.startswith(prompt), f"\n\n{len(prompt)} tokens: 28 92" in text) == (0, True, True)
    nowhere = ["--upstreams", "127.0.0.1:1", "--timeout-s", "0.5", *flags[2:]]
    assert run("prompt", "--model", "brief", *nowhere, str(messages)) == (0, text)


def test_check_tells_what_is_wrong_with_each(server: StockServer, folder: Path) -> None:
    models = {
        "gone": {"entry": "nothing"},
        "mistaken": {"entry": "llmapi", "dialect": "vllm"},
        "miscounted": {"entry": "vllm", "tokenizer": str(folder / "tokenizer")},
    }
    (folder / "wrong.yaml").write_text(yaml.safe_dump({"upstreams": [server.grpc], "models": models}))
    status, text = run("check", "--config", str(folder / "wrong.yaml"))
    assert status == 1
    assert "model gone: not_ready, entry nothing" in text
    assert (
        "model mistaken: not_ready, entry llmapi (the model entry 'llmapi' is not of the dialect vllm" in text
    )
    assert "model miscounted: its tokenizer is another one" in text
    assert "model miscounted: ready, entry vllm, dialect vllm" in text


async def test_an_adapter_of_the_file_is_a_model_while_it_stands_there(
    gateway: ServeProcess, folder: Path
) -> None:
    plain = document(folder)["plain"]
    await changed(gateway, folder, document(folder) | {"plain": plain | {"adapters": ["tuned"]}})
    async with client(gateway) as sdk:
        listed = {each.id: each.to_dict().get("parent") async for each in sdk.models.list()}
        assert (listed["tuned"], listed["plain"]) == ("plain", None)
        answer = await sdk.chat.completions.create(model="tuned", messages=say("Hello"))
        assert (answer.choices[0].message.content, answer.model) == ("tuned: Hello", "tuned")
        await changed(gateway, folder, document(folder))
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="tuned", messages=say("Hello"))
