import json
from pathlib import Path
from typing import Any

import pytest

from triton_models.directory import chat_template, detect_format
from triton_models.errors import CheckpointError


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
