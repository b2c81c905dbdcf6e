"""Reads a checkpoint directory's JSON files, and determines the chat format from them.

Opens no weights and does not import torch, so that what runs no engine can use it cheaply.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from triton_models.errors import CheckpointError

FormatName = Literal["chatglm2", "chatglm3", "glm4", "template"]

_NAMES: dict[FormatName, tuple[str, ...]] = {
    "chatglm2": ("chatglm2",),
    "chatglm3": ("chatglm3",),
    "glm4": ("glm4", "glm-4"),
}
"""How each format is spelt in names of checkpoints."""

_GLM4_TOKENIZER = "ChatGLM4Tokenizer"


@dataclass(frozen=True, slots=True)
class ConfigNumbers:
    """The numbers in a configuration; null stands for a key that is left out."""

    path: Path
    """Of its file, for messages."""
    raw: Mapping[str, Any]

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer.

        Raises:
            CheckpointError: it is something else, or left out and without `default`.
        """
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number.

        Raises:
            CheckpointError: it is something else, or left out and without `default`.
        """
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{self.path}: {key} must be a positive number, not {value!r}")
        return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file cannot be read, or is something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return document


def read_optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or is something else.
    """
    return read_json(path) if path.is_file() else {}


def detect_format(directory: Path) -> FormatName:
    """Return the chat format that a checkpoint was trained with.

    It is `template` outside ChatGLM's own layout. Within it, the first of these that is conclusive decides:
    the tokenizer's class if it is GLM-4's, the name under which the checkpoint was published, the tokens and
    the template in the tokenizer configuration, the directory's name.

    Raises:
        CheckpointError: none of these is conclusive, or a file in the directory is broken.
    """
    model_type = read_optional_json(directory / "config.json").get("model_type")
    if model_type != "chatglm" and (directory / "tokenizer.json").is_file():
        return "template"
    found = format_evidence(directory)
    if found is None:
        raise CheckpointError(
            f"{directory}: neither its files nor its name say whether it is ChatGLM2, ChatGLM3 or GLM-4;"
            f" set the parameter 'format' to one of {', '.join(_NAMES)}"
        )
    return found


def format_evidence(directory: Path) -> FormatName | None:
    """Return the chat format that the directory's files or its name indicate; None if neither does.

    Raises:
        CheckpointError: a file in the directory is broken.
    """
    tokenizer = read_optional_json(directory / "tokenizer_config.json")
    config = read_optional_json(directory / "config.json")
    if tokenizer.get("tokenizer_class") == _GLM4_TOKENIZER:  # everything else looks like ChatGLM3
        return "glm4"
    for document in (tokenizer, config):
        for key in ("name_or_path", "_name_or_path"):
            if (found := _format_in(document.get(key))) is not None:
                return found
    for key in ("added_tokens_decoder", "chat_template"):
        if "<|user|>" in str(tokenizer.get(key)):
            return "chatglm3"
    return _format_in(directory.resolve().name)


def chat_template(directory: Path) -> str | None:
    """Return the chat template in the tokenizer configuration, as text that is never run; None if absent.

    Raises:
        CheckpointError: the tokenizer configuration is broken.
    """
    template = read_optional_json(directory / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _format_in(name: object) -> FormatName | None:
    """Return the only format whose name occurs in `name`; None if there are none or several."""
    found = [each for each, names in _NAMES.items() if any(part in str(name).lower() for part in names)]
    return found[0] if len(found) == 1 else None
