import json
from pathlib import Path
from typing import Any

import pytest

from triton_models.directory import (
    BLOOM_TYPE,
    CHATGLM_TYPE,
    NATIVE_TYPES,
    chat_template,
    check_checkpoint,
    detect_format,
    find_shards,
)
from triton_models.errors import CheckpointError, UnsupportedArchitectureError


@pytest.mark.parametrize(
    ("tokenizer", "config", "folder", "expected"),
    [
        ({"name_or_path": "THUDM/chatglm2-6b"}, {}, "x", "chatglm2"),
        ({"name_or_path": "THUDM/chatglm3-6b-32k"}, {}, "chatglm2", "chatglm3"),
        ({}, {"_name_or_path": "/data/ChatGLM3-6B"}, "x", "chatglm3"),
        ({"added_tokens_decoder": {"64795": {"content": "<|user|>"}}}, {}, "chatglm2", "chatglm3"),
        ({"chat_template": "{% ... %}<|user|>"}, {}, "x", "chatglm3"),
        ({"tokenizer_class": "ChatGLM4Tokenizer", "chat_template": "<|user|>"}, {}, "chatglm3", "glm4"),
        ({}, {"_name_or_path": "THUDM/glm-4-9b-chat"}, "x", "glm4"),
        ({}, {}, "GLM4-tuned", "glm4"),
        ({}, {}, "my-ChatGLM2-tuned", "chatglm2"),
        ({"name_or_path": "chatglm2-to-chatglm3"}, {}, "chatglm3", "chatglm3"),
        ({"name_or_path": None}, {}, "x", None),
        (None, None, "x", None),
    ],
)
def test_the_format_is_told_by_the_best_evidence(
    tmp_path: Path,
    tokenizer: dict[str, Any] | None,
    config: dict[str, Any] | None,
    folder: str,
    expected: str | None,
) -> None:
    directory = tmp_path / folder
    directory.mkdir()
    for name, document in (("tokenizer_config.json", tokenizer), ("config.json", config)):
        if document is not None:
            (directory / name).write_text(json.dumps(document), encoding="utf-8")
    if expected is not None:
        assert detect_format(directory) == expected
        return
    with pytest.raises(
        CheckpointError, match=r"set the parameter 'format' to one of chatglm2, chatglm3, glm4"
    ):
        detect_format(directory)


@pytest.mark.parametrize(
    ("said", "expected"),
    [({"chat_template": "[gMASK]"}, "[gMASK]"), ({}, None), ({"chat_template": [{"name": "default"}]}, None)],
)
def test_the_template_is_text(tmp_path: Path, said: dict[str, Any], expected: str | None) -> None:
    assert chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    assert chat_template(tmp_path) == expected


def write_index(directory: Path, weight_map: object, name: str = "model.safetensors") -> None:
    document = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{name}.index.json").write_text(json.dumps(document), encoding="utf-8")


def test_an_index_says_what_is_where(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).touch()
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    assert find_shards(tmp_path) == {
        tmp_path / "one.safetensors": {"a", "c"},
        tmp_path / "two.safetensors": {"b"},
    }


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).touch()
    assert list(find_shards(tmp_path)) == [tmp_path / "model.safetensors"]


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights: neither model.safetensors nor pytorch_model.bin"):
        find_shards(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/x", "..\\x", "..", ".", "", 7, None])
def test_an_index_may_not_lead_out_of_its_directory(tmp_path: Path, name: object) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (tmp_path / "x").touch()
    write_index(directory, {"a": name})
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'a' .* no plain file name"):
        find_shards(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [1]])
def test_an_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: no weight_map"):
        find_shards(tmp_path)


def test_a_shard_that_is_not_there_is_named_with_a_tensor_of_it(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "gone.bin"}, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"gone\.bin: missing; .* holds tensor 'a'"):
        find_shards(tmp_path)


def write_checkpoint(
    directory: Path, model_type: object, *files: str, weights: str = "model.safetensors"
) -> Path:
    """Write what says what a checkpoint is, and empty files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    for name in (*files, weights):
        (directory / name).touch()
    return directory


def test_an_engine_for_more_kinds_of_models_takes_more(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "pythia", "gpt_neox", "tokenizer.json")
    with pytest.raises(UnsupportedArchitectureError, match="--engine transformers"):
        check_checkpoint(tmp_path / "pythia")
    check_checkpoint(tmp_path / "pythia", any_type=True)


@pytest.mark.parametrize("model_type", [*NATIVE_TYPES, BLOOM_TYPE])
def test_what_can_be_loaded_passes(tmp_path: Path, model_type: str) -> None:
    check_checkpoint(write_checkpoint(tmp_path / "chatglm3", CHATGLM_TYPE, "tokenizer.model"))
    check_checkpoint(write_checkpoint(tmp_path / "x", CHATGLM_TYPE, "tokenizer.model"), "chatglm2")
    check_checkpoint(write_checkpoint(tmp_path / "y", model_type, "tokenizer.json"))
    assert detect_format(tmp_path / "y") == "template"


@pytest.mark.parametrize("chat_format", [None, "chatglm2"])
def test_the_first_chatglm_is_refused_by_name(tmp_path: Path, chat_format: str | None) -> None:
    """Its files tell no format, and its tokenizer has another name."""
    directory = write_checkpoint(tmp_path / "chatglm-6b", CHATGLM_TYPE, "ice_text.model")
    config = {"model_type": CHATGLM_TYPE, "position_encoding_2d": True, "inner_hidden_size": 16384}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedArchitectureError, match=r"config\.json: this is ChatGLM-6B"):
        check_checkpoint(directory, chat_format)


@pytest.mark.parametrize("model_type", ["phi3", "qwen2_vl", None, ["llama"]])
def test_another_family_is_refused_with_those_that_are_served(tmp_path: Path, model_type: object) -> None:
    directory = write_checkpoint(tmp_path / "x", model_type, "tokenizer.json")
    with pytest.raises(UnsupportedArchitectureError, match=r"not supported; chatglm, .*llama.* are") as found:
        check_checkpoint(directory)
    assert "vLLM" in str(found.value)


@pytest.mark.parametrize(
    ("model_type", "chat_format", "missing"),
    [
        ("llama", None, "tokenizer.json"),
        ("qwen3", None, "tokenizer.json"),
        ("glm4", "template", "tokenizer.json"),
        ("opt", None, "tokenizer.json"),
        (CHATGLM_TYPE, "chatglm3", "tokenizer.model"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_named(
    tmp_path: Path, model_type: str, chat_format: str | None, missing: str
) -> None:
    # What does not count: the tokenizer of the other kind, and a name that says another format.
    other = {"tokenizer.json": "tokenizer.model", "tokenizer.model": "tokenizer.json"}[missing]
    directory = write_checkpoint(tmp_path / "like-chatglm3", model_type, other)
    with pytest.raises(CheckpointError, match=f"{missing}: missing; it is among the published files"):
        check_checkpoint(directory, chat_format, any_type=True)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "x", "llama", "tokenizer.json", weights="model.gguf")
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors nor"):
        check_checkpoint(directory)


def test_a_format_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "x", CHATGLM_TYPE, "tokenizer.model")
    with pytest.raises(CheckpointError, match="set the parameter 'format'"):
        check_checkpoint(directory)
