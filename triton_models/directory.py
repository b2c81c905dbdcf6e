"""Reads a checkpoint directory's JSON files: which weights there are, which chat format, what is missing.

Opens no weights and does not import torch, so that what runs no engine can use it cheaply.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from triton_models.errors import CheckpointError, UnsupportedArchitectureError

CHATGLM_TYPE: Final = "chatglm"
"""The `model_type` of ChatGLM2, ChatGLM3 and GLM-4 in their original form."""

NATIVE_TYPES: Final = ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
"""The `model_type` of transformers' own classes that are served and much like Llama's."""

BLOOM_TYPE: Final = "bloom"
SERVED_TYPES: Final = (CHATGLM_TYPE, *NATIVE_TYPES, BLOOM_TYPE)

_GLM_TYPES: Final = (CHATGLM_TYPE, "glm", "glm4")
"""Those whose tokenizer may be ChatGLM's own."""

TOKENIZER_FILE: Final = "tokenizer.model"
"""The tokenizer's file in ChatGLM's own layout, whatever its contents."""
TOKENIZER_JSON: Final = "tokenizer.json"
"""That of Hugging Face's tokenizers."""

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX_SUFFIX = ".index.json"

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


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's tokenizer configuration, with its special tokens; empty if there is none.

    Older ones list no added tokens, and a file of its own says there which the special ones are.

    Raises:
        CheckpointError: a file in the directory is broken.
    """
    config = read_optional_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return {**config, **read_optional_json(directory / "special_tokens_map.json")}


def check_checkpoint(directory: Path, chat_format: str | None = None, *, any_type: bool = False) -> str:
    """Check that a directory has what loading it will look for, as far as that can be told without torch.

    Returns the chat format.

    Args:
        directory: the checkpoint's.
        chat_format: the option `format`; None: the checkpoint says.
        any_type: whether the engine serves more kinds of models than our own forward passes.

    Raises:
        UnsupportedArchitectureError: it is another kind of model; the message says which are served.
        CheckpointError: a file is missing or broken, or nothing tells the chat format.
    """
    path = directory / "config.json"
    config = read_json(path)
    if not any_type:
        check_model_type(path, config)
    find_shards(directory)
    found = chat_format or detect_format(directory)
    template = found == "template"
    tokenizer = directory / (TOKENIZER_JSON if template else TOKENIZER_FILE)
    if not tokenizer.is_file():
        written = "; transformers' save_pretrained writes it, too" if template else ""
        raise CheckpointError(f"{tokenizer}: missing; it is among the published files{written}")
    return found


def check_model_type(path: Path, raw: Mapping[str, Any]) -> None:
    """Check that the contents of the `config.json` at `path` are of a kind of model that is served.

    Raises:
        UnsupportedArchitectureError: they are not.
    """
    if "vision_config" in raw:
        raise UnsupportedArchitectureError(f"{path}: this model sees images, which is not supported")
    if raw.get("model_type") == CHATGLM_TYPE and "position_encoding_2d" in raw:
        raise UnsupportedArchitectureError(
            f"{path}: this is ChatGLM-6B, the first of its name, which is not supported;"
            " ChatGLM2, ChatGLM3 and GLM-4 are"
        )
    if (model_type := raw.get("model_type")) not in SERVED_TYPES:
        raise UnsupportedArchitectureError(
            f"{path}: model_type {model_type!r} is not supported; {', '.join(SERVED_TYPES)} are. Others may"
            " run with `--engine transformers`, or on a Triton with vLLM or TensorRT-LLM behind"
            " `tritongate serve`"
        )


def find_shards(directory: Path) -> dict[Path, set[str] | None]:
    """Return the weight files, each with the tensor names that the index lists for it; None without an index.

    Safetensors are preferred to `.bin` files.

    Raises:
        CheckpointError: there are no weights, the index is broken, or a file that it names is missing.
    """
    for name in _SINGLE_FILES:
        if (directory / name).is_file():
            return {directory / name: None}
        index = directory / (name + _INDEX_SUFFIX)
        if index.is_file():
            return _read_index(index)
    raise CheckpointError(
        f"{directory}: no weights: neither {' nor '.join(_SINGLE_FILES)}, nor one's {_INDEX_SUFFIX}"
    )


def detect_format(directory: Path) -> FormatName:
    """Return the chat format that a checkpoint was trained with.

    It is `template` outside ChatGLM's own layout. Within it, the first of these that is conclusive decides:
    the tokenizer's class if it is GLM-4's, the name under which the checkpoint was published, the tokens and
    the template in the tokenizer configuration, the directory's name.

    Raises:
        CheckpointError: none of these is conclusive, or a file in the directory is broken.
    """
    model_type = read_optional_json(directory / "config.json").get("model_type")
    other = model_type not in (None, *_GLM_TYPES)
    if other or (model_type != CHATGLM_TYPE and (directory / TOKENIZER_JSON).is_file()):
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


def _read_index(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    shards: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        # A shard lies beside its index; another path could make a checkpoint read any file of the machine.
        if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to be in {name!r}, which is no plain file name"
            )
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {index.name} says that it holds tensor {tensor!r}")
        names = shards.setdefault(path, set())
        if names is not None:
            names.add(tensor)
    return shards
