import asyncio
import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec import structs
from tokenizers import Tokenizer, models

from gateway.commands.check import check
from gateway.core.request import Generation
from gateway.core.upstream import Embedding, Tokenization, Vector
from gateway.errors import InvalidRequestError
from gateway.triton.public import PublicModels
from tests.gateway.certificates import expired
from tests.gateway.serving import settings
from tests.gateway.triton.fake_resolver import FakeResolver
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton

VLLM = ("text_input", "stream", "sampling_parameters", "return_num_output_tokens")
LLM_API = ("text_input", "sampling_param_max_tokens")


def folder(path: Path, *, template: str | None = None) -> str:
    """Make a tokenizer's folder."""
    path.mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


async def test_all_is_well(triton: FakeTriton) -> None:
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert [finding.text for finding in findings] == [
        f"upstream {triton.address}: live",
        "  model m: ready, format chatglm3, context 512 tokens",
    ]
    assert all(finding.ok for finding in findings)


async def test_published_faults_are_told_and_are_no_failure(triton: FakeTriton) -> None:
    triton.version = "2.51.0"
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert findings[1].text.startswith("  warning: Triton 2.51.0 has published faults: ")
    assert "first release without them is 26.07" in findings[1].text
    assert all(finding.ok for finding in findings)
    findings = await check(settings(upstreams=[triton.address], warn_of_faults=False), timeout_s=10)
    assert not [finding for finding in findings if "warning" in finding.text]


async def test_an_expired_certificate_is_told(triton: FakeTriton, tmp_path: Path) -> None:
    files = expired(tmp_path, "old")
    tls = {"tls_cert": files.cert, "tls_key": files.key}
    first, *others = await check(settings(upstreams=[triton.address], **tls), timeout_s=10)
    assert (first.ok, first.text.startswith(f"tls_cert: {files.cert} expired on ")) == (False, True)
    assert all(finding.ok for finding in others)


async def test_a_model_that_is_not_there(triton: FakeTriton) -> None:
    triton.models["n"] = FakeModel(state="UNAVAILABLE")
    findings = await check(settings(upstreams=[triton.address], models=["m", "n"]), timeout_s=10)
    assert [finding.ok for finding in findings] == [True, True, False, False]
    assert findings[-1].text == "model n: ready on no upstream"


async def test_no_models(triton: FakeTriton) -> None:
    triton.models.clear()
    findings = await check(settings(upstreams=[triton.address]), timeout_s=3)
    assert [finding.ok for finding in findings] == [True, False]
    assert findings[-1].text == "no model can be served: none is loaded"


async def test_a_model_whose_chats_would_be_refused(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All was well where every chat was a 400."""
    triton.models = {"vllm": FakeModel(inputs=VLLM)}
    told = "model vllm: no chat template: chats get a 400, completions work; set tokenizers to vllm=FOLDER"
    for tokenizers in ([], [f"vllm={folder(tmp_path / 'base')}"]):
        findings = await check(settings(upstreams=[triton.address], tokenizers=tokenizers), timeout_s=10)
        assert (findings[-1].ok, findings[-1].text) == (True, told)
    chats = folder(tmp_path / "chats", template="{{ messages[0].content }}")
    findings = await check(settings(upstreams=[triton.address], tokenizers=[f"vllm={chats}"]), timeout_s=10)
    assert told not in [finding.text for finding in findings]

    async def embed(_: PublicModels, request: Embedding) -> Vector:
        return Vector(values=[1.0], tokens=1)

    monkeypatch.setattr(PublicModels, "embed", embed)
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert [finding.text for finding in findings][1:] == ["  model vllm: ready, dialect vllm"]


@pytest.mark.parametrize("refused", ["tokenize", "generate"])
async def test_a_model_that_embeds_and_has_a_tokenizer(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: str
) -> None:
    """It was a failure that it writes no text: a plain model counts none, one of vLLM generates none."""

    async def embed(_: PublicModels, request: Embedding) -> Vector:
        return Vector(values=[1.0], tokens=1)

    def refuse(_: PublicModels, request: Tokenization | Generation) -> NoReturn:
        raise InvalidRequestError("The model does not do this.", param="model")

    monkeypatch.setattr(PublicModels, "embed", embed)
    monkeypatch.setattr(PublicModels, refused, refuse)
    triton.models = {"vllm": FakeModel(inputs=VLLM)}
    given = [f"vllm={folder(tmp_path / 'base')}"]
    findings = await check(settings(upstreams=[triton.address], tokenizers=given), timeout_s=10)
    assert [(finding.ok, finding.text) for finding in findings][2:] == [
        (True, "model vllm: embeds; its tokenizer was not compared")
    ]


async def test_a_templated_model_of_ours_whose_chats_would_be_refused(triton: FakeTriton) -> None:
    triton.model.report = structs.replace(triton.model.report, format="template")
    findings = await check(settings(upstreams=[triton.address], models={"pub": {"entry": "m"}}), timeout_s=10)
    assert findings[-1].text.startswith("model pub: no chat template: ")
    assert findings[-1].text.endswith("set tokenizers to m=FOLDER")


async def test_a_tokenizer_for_no_model(triton: FakeTriton, tmp_path: Path) -> None:
    given = [f"qwen={folder(tmp_path / 'base')}"]
    for chosen in ({}, {"models": ["m"]}):
        findings = await check(settings(upstreams=[triton.address], tokenizers=given, **chosen), timeout_s=10)
        assert (findings[-1].ok, findings[-1].text) == (
            False,
            "tokenizers: no model is called 'qwen'; there are: m",
        )
    away = [triton.address, "127.0.0.1:1"]
    findings = await check(settings(upstreams=away, tokenizers=given), timeout_s=3)
    assert not [finding for finding in findings if "qwen" in finding.text]


async def test_what_is_set_for_no_model(triton: FakeTriton) -> None:
    keys = [{"name": "team", "key": "sk", "models": ["pub", "alias", "tuned", "m", "typo"]}]
    models = {"pub": {"entry": "m", "aliases": ["alias"], "adapters": ["tuned"]}}
    given: dict[str, Any] = {"upstreams": [triton.address], "models": models, "api_keys": keys}
    on_demand = {"load_on_demand": True, "pinned_models": ["pub", "alias", "m", "pib"]}
    findings = await check(settings(**given, **on_demand, contract=["m=logits", "x=logits"]), timeout_s=10)
    assert [finding.text for finding in findings if not finding.ok] == [
        "contract: no model is called 'x'; there are: m, pub",
        "pinned_models: no model is called 'pib'; there are: alias, m, pub",
        "models of the key team: no model is called 'm'; there are: alias, pub, tuned",
        "models of the key team: no model is called 'typo'; there are: alias, pub, tuned",
    ]


async def test_why_a_model_is_left_out(triton: FakeTriton, tmp_path: Path) -> None:
    triton.models["llmapi"] = FakeModel(inputs=LLM_API)
    line = "  model llmapi: left out (it counts no tokens: set tokenizers to llmapi=FOLDER)"
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert [finding.text for finding in findings][2:] == [line]
    assert all(finding.ok for finding in findings)
    del triton.models["m"]
    findings = await check(settings(upstreams=[triton.address]), timeout_s=3)
    last = "no model can be served: see the reasons above"
    assert [(finding.ok, finding.text) for finding in findings][1:] == [(True, line), (False, last)]
    findings = await check(settings(upstreams=[triton.address], tokenizers=[str(tmp_path)]), timeout_s=3)
    assert findings[1].text == (
        f"  model llmapi: left out (the tokenizer of 'llmapi': {tmp_path} has no tokenizer.json)"
    )


async def test_names_are_looked_up(triton: FakeTriton) -> None:
    resolver = FakeResolver(triton=[triton.address], nobody=[], failing=socket.gaierror(-3, "no server"))
    names = ["dns:///triton:1", triton.address, "dns:///nobody:1", "dns:///failing:1"]
    findings = await check(settings(upstreams=names), timeout_s=10, resolve=resolver)
    assert [(finding.ok, finding.text) for finding in findings] == [
        (True, f"upstream dns:///triton:1: {triton.address}"),
        (False, "upstream dns:///nobody:1: has no addresses"),
        (False, "upstream dns:///failing:1: cannot be looked up (no server)"),
        (True, f"upstream {triton.address}: live"),
        (True, "  model m: ready, format chatglm3, context 512 tokens"),
    ]


async def test_a_name_that_nobody_looks_up_in_time() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    findings = await check(settings(upstreams=["dns:///triton:1"]), timeout_s=0.1, resolve=never)
    assert findings[0].text == "upstream dns:///triton:1: not looked up within 0.1 s"


async def test_a_repository_that_is_restricted(triton: FakeTriton) -> None:
    triton.restriction = ("triton-grpc-protocol-admin-key", "s3cret")
    (found,) = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert not found.ok
    assert "not_permitted" in found.text
    assert "repository_key" in found.text
    findings = await check(
        settings(upstreams=[triton.address], repository_key="admin-key=s3cret"), timeout_s=10
    )
    assert all(finding.ok for finding in findings)
    # What is named need not be listed.
    findings = await check(settings(upstreams=[triton.address], models=["m"]), timeout_s=10)
    assert all(finding.ok for finding in findings)


async def test_a_model_on_a_triton_that_is_away(triton: FakeTriton) -> None:
    away = [triton.address, "127.0.0.1:1"]
    findings = await check(settings(upstreams=away, models=["m"]), timeout_s=10)
    assert findings[-1].text == "  model m: unreachable (connection refused)"
