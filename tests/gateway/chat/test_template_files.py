"""Where a folder has its chat template, and the special tokens that it names."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gateway.chat.templates import ChatTemplate, TemplateError
from gateway.core.request import Conversation, Message
from gateway.errors import InvalidRequestError


@pytest.fixture
def theirs() -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>")), bos_token="<s>"
    )


def test_where_templates_are_found(tmp_path: Path) -> None:
    def rendered() -> str:
        template = ChatTemplate.read(tmp_path)
        assert template is not None
        return template.render(Conversation((Message(role="user", content="Hi"),)))

    config: dict[str, Any] = {"bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ bos_token }}processor"}')
    assert rendered() == "<s>processor"
    config["chat_template"] = "{{ bos_token }}one"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "<s>one"
    config["chat_template"] = [{"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "two"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}three")
    assert rendered() == "<s>three"


@pytest.mark.parametrize(
    "named",
    [
        {"bos_token": {"content": "<s>", "lstrip": False}},
        {"bos_token": "<s>", "added_tokens_decoder": {"0": {"content": "<s>"}}},
        {},
    ],
)
def test_special_tokens_of_older_checkpoints_have_a_file_of_their_own(
    theirs: Any, tmp_path: Path, named: dict[str, Any]
) -> None:
    theirs.save_pretrained(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | named))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
    talk = Message(role="user", content="Hi")
    ours, again = ChatTemplate.read(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    assert ours.render(Conversation((talk,))) == again.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )


@pytest.mark.parametrize(
    "named", [{"image_token": "<img>"}, {"extra_special_tokens": {"image_token": "<img>"}}]
)
def test_a_models_own_tokens_are_there_by_their_names(
    theirs: Any, tmp_path: Path, named: dict[str, Any]
) -> None:
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {
        "chat_template": "{{ image_token }}{{ bos_token }}{{ pad_token is defined }}",
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | named))
    ours, again = ChatTemplate.read(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    assert ours.render(Conversation((Message(role="user", content="Hi"),))) == "<img><s>False"
    assert again.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<img><s>False"
    with pytest.raises(InvalidRequestError, match="image_token"):
        ours.render(Conversation((Message(role="user", content="Hi"),), switches={"image_token": "x"}))


def test_transformers_saves_a_template_for_tools_beside_the_default_one(theirs: Any, tmp_path: Path) -> None:
    theirs.chat_template = {"default": "plain", "tool_use": "with tools"}
    theirs.save_pretrained(tmp_path)
    ours = ChatTemplate.read(tmp_path)
    assert ours is not None
    assert ours.sources == theirs.chat_template


@pytest.mark.parametrize("config", [None, "{}", '{"bos_token": "<s>", "chat_template": null}'])
def test_a_base_model_has_none(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    assert ChatTemplate.read(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"chat_template": "{% if %}"}', "not valid Jinja"),
        ('{"chat_template": [{"name": "rag", "template": ""}]}', "called 'default'"),
        ('{"chat_template": 5}', "no text"),
    ],
)
def test_unusable_templates_say_why(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate.read(tmp_path)
