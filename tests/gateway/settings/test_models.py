from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import ConfigurationError, Settings, load_settings, reload
from gateway.settings.models import ModelSettings
from gateway.settings.values import Contract
from gateway.triton.dialects import DIALECTS

KEYS = [{"name": "ann", "key": "k"}]


def file_of(folder: Path, document: Any, name: str = "models.yaml") -> str:
    (folder / name).write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(folder / name)


def faults(**values: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(values)
    return str(caught.value).splitlines()


def test_a_file_says_everything_of_a_name(tmp_path: Path) -> None:
    given = {
        "entry": "vllm",
        "aliases": ["gpt-4o"],
        "adapters": ["tuned"],
        "upstreams": ["a:1", "dns:b:2"],
        "dialect": "vllm",
        "tokenizer": str(tmp_path),
        "system": "Be brief.",
        "stop": ["###"],
        "defaults": {"temperature": 1, "top_k": 4, "max_tokens": 100},
        "limits": {"max_tokens": 1000, "max_prompt_tokens": 5000, "n": 2},
        "keys": ["ann"],
        "contract": "unbatched",
    }
    path = file_of(tmp_path, {"models": {"qwen": given, "plain": None}})
    settings = load_settings({"models_file": path, "api_keys": KEYS})
    assert list(settings.models) == ["plain", "qwen"]
    qwen = settings.models["qwen"]
    assert qwen.model_dump(mode="json", exclude_defaults=True) == given | {
        "upstreams": ["a:1", "dns:///b:2"],
        "defaults": {"temperature": 1.0, "top_k": 4, "max_tokens": 100},
    }
    assert qwen.defaults.of_requests() == {"temperature": 1.0, "top_k": 4}
    assert settings.all_upstreams() == ("127.0.0.1:8001", "a:1", "dns:///b:2")
    # The same by way of a configuration file, and through what workers are told.
    config = Path(file_of(tmp_path, {"models": {"qwen": given, "plain": None}, "api_keys": KEYS}, "c.yaml"))
    assert load_settings(config=config).models == settings.models
    assert Settings(**settings.model_dump()).models == settings.models


def test_every_fault_is_named_with_file_model_and_key(tmp_path: Path) -> None:
    models = {
        "a": {"dialect": "nope", "tokenizer": "/nowhere", "defaults": {"top_p": 2, "temprature": 1}},
        "b": {"limits": {"n": 0}, "uptreams": ["x:1"]},
        "c": 3,
        "d": {"upstreams": 5},
        "e": {"upstreams": ["a:1", "b"]},
    }
    path = file_of(tmp_path, {"models": models})
    assert [line.partition(" (from ") for line in faults(models_file=path)] == [
        (fault, " (from ", path + ")")
        for fault in (
            f"models.a.dialect: 'nope' is no dialect; known are auto, {', '.join(DIALECTS)}",
            "models.a.tokenizer: '/nowhere' is no folder",
            "models.a.defaults.top_p: Expected `float` <= 1.0",
            "models.a.defaults.temprature: unknown key; did you mean temperature?",
            "models.b.limits.n: Input should be greater than or equal to 1",
            "models.b.uptreams: unknown key; did you mean upstreams?",
            "models.c: a mapping is needed",
            "models.d.upstreams: a list is needed",
            "models.e.upstreams.1: 'b' is not host:port",
        )
    ]


def test_names_do_not_contradict_each_other(tmp_path: Path) -> None:
    models = {
        "a": {"entry": "e", "aliases": ["x", "b"], "keys": ["ann", "bob"]},
        "b": {"entry": "e", "aliases": ["x"], "adapters": ["x", "c"], "tokenizer": str(tmp_path)},
        "c": {"entry": "e", "upstreams": ["other:1"], "dialect": "vllm"},
    }
    path = file_of(tmp_path, {"models": models})
    assert faults(models_file=path, api_keys=KEYS) == [
        "models.a.aliases: 'b' is a model already",
        "models.a.keys: no api_key has the name 'bob'",
        "models.b.aliases: 'x' is an alias of 'a' already",
        "models.b.adapters: 'x' is an alias of 'b' already",
        "models.b.adapters: 'c' is a model already",
        "models.b.tokenizer: not as for 'a', which is the same entry",
    ]


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"models": {}}, "models: a mapping of public names is needed"),
        ({"models": ["a"]}, "models: a mapping of public names is needed"),
        ({"port": 1, "models": {"a": {}}}, "port: unknown key, only `models` is known"),
        (None, "models: a mapping of public names is needed"),
    ],
)
def test_a_file_without_names_is_refused(tmp_path: Path, document: Any, fault: str) -> None:
    path = file_of(tmp_path, document)
    assert faults(models_file=path) == [f"{fault} (from {path})"]


def test_ids_and_a_file_exclude_each_other(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"models": {"a": {}}})
    assert "give one of the two" in faults(models_file=path, models="b")[0]


def test_the_same_name_twice_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("models:\n  a: {}\n  a: {entry: x}\n")
    assert faults(models_file=str(tmp_path / "m.yaml")) == [
        f"{tmp_path}/m.yaml is not valid YAML at line 3: the key 'a' is there twice"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("models:\t5\n", " at line 1: found character '\\t' that cannot start any token"),
        ("models: a\n  host: x\n", " at line 2: mapping values are not allowed here"),
        ("a: [1\n", " at line 2: expected ',' or ']', but got '<stream end>'"),
        ("models: [a, b}\n", " at line 1: expected ',' or ']', but got '}'"),
        ("a: 1\n b: 2\n", " at line 2: mapping values are not allowed here"),
        ('a: "\\q"\n', " at line 1: found unknown escape character 'q'"),
        ("a: 1\n- b\n", " at line 2: expected <block end>, but found '-'"),
        ("models: *secret\n", " at line 1: found undefined alias"),
        ("models: !secret!x\n", " at line 1: found undefined tag handle"),
        ("models: !secret\n", " at line 1: could not determine a constructor for the tag"),
        ("models: !sec'ret\n", " at line 1: could not determine a constructor for the tag"),
        ("a: &secret 1\nb: &secret 2\n", " at line 2: second occurrence"),
        ("%TAG !secret! a\n%TAG !secret! b\n--- 1\n", " at line 2: duplicate tag handle"),
        ("models: !!binary secr\u00e9t\n", " at line 1: failed to convert base64 data into ascii"),
        ("models: !!binary secret\n", " at line 1: failed to decode base64 data: Incorrect padding"),
        ("models: \x00\n", ": special characters are not allowed"),
        ("models: 2024-13-45\n", ""),
    ],
    ids=[
        "tab",
        "indented",
        "unclosed",
        "closed as another",
        "nested",
        "escape",
        "item",
        "alias",
        "handle",
        "tag",
        "quote in a tag",
        "anchor",
        "handle twice",
        "not ascii",
        "not base64",
        "control",
        "date",
    ],
)
def test_broken_yaml_is_a_fault_that_quotes_at_most_one_character(
    tmp_path: Path, text: str, fault: str
) -> None:
    (tmp_path / "m.yaml").write_text(text)
    assert faults(models_file=str(tmp_path / "m.yaml")) == [f"{tmp_path}/m.yaml is not valid YAML{fault}"]


def test_older_settings_say_the_same_of_names(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tokenizers, contract = (str(tmp_path), f"e={other}"), ("unbatched", "e=chatglm2")
    given = {"models": "e,f", "tokenizers": tokenizers, "contract": contract, "upstreams": ["t:1"]}
    settings = Settings.model_validate(given)
    assert settings.models == {"e": ModelSettings(entry="e"), "f": ModelSettings(entry="f")}
    of_e = ModelSettings(entry="e", upstreams=["t:1"], tokenizer=str(other), contract=Contract.FLAT)
    assert settings.model("e") == of_e
    assert settings.model("found").tokenizer == str(tmp_path)
    assert settings.model("found").contract is Contract.UNBATCHED


def test_a_file_is_read_again_with_the_other_settings_as_they_were(tmp_path: Path) -> None:
    path = Path(file_of(tmp_path, {"models": {"a": {}}, "port": 81, "api_keys": KEYS}))
    settings = load_settings(config=path)
    file_of(tmp_path, {"models": {"b": {"keys": ["ann"]}}, "port": 82})
    again = reload(settings, "models")
    assert (list(again.models), again.port, again.api_keys) == (["b"], 81, settings.api_keys)
    file_of(tmp_path, {"models": {"b": {"keys": ["bob"]}}, "prot": 82})
    with pytest.raises(ConfigurationError, match="prot: unknown key"):
        reload(settings, "models")


def test_the_environment_has_a_mapping_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TRITONGATE_MODELS", '{"qwen": {"entry": "vllm_model", "aliases": ["gpt"]}, "glm": null}'
    )
    settings = load_settings()
    assert {name: (each.entry, each.aliases) for name, each in settings.models.items()} == {
        "qwen": ("vllm_model", ("gpt",)),
        "glm": ("glm", ()),
    }
    for wrong in ('{"qwen": {"entry": 1}}', '{"qwen": ', "{qwen: {}}"):
        with pytest.raises(ConfigurationError, match="models"):
            load_settings({"models": wrong})
