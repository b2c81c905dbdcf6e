"""YAML files with settings: how they are read, and what is said of one that cannot be used."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel, ValidationInfo, field_validator

_MERGE: Final = "tag:yaml.org,2002:merge"
_KINDS: Final = {"models": (dict, "mapping of public names"), "api_keys": (list, "list of keys")}
_BEFORE_QUOTE: Final = re.compile(r"""(?s)((?:[^'"]|'(?:\\?.|\\[xuU]\w+|<[\w ]+>)'|"'")*).*""")
"""A fault up to the first quote of more than a character, which may be a key; `<block end>` is YAML's own."""


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the field and where its value came from."""


def read_field(path: str, field: str, others: Collection[str] = ()) -> Any:
    """Return what a file says of `models` or of `api_keys`, unchecked.

    Args:
        path: of the file.
        field: the one of the two that must be there; empty is as bad as missing.
        others: what else may stand there, as in a configuration file.

    Raises:
        ConfigurationError: it cannot be read, or does not have the field.
    """
    document = read_yaml(Path(path))
    for name in document:
        if name != field and name not in others:
            raise ConfigurationError(f"{name}: unknown key, only `{field}` is known (from {path})")
    kind, described = _KINDS[field]
    found = document.get(field)
    if not (isinstance(found, kind) and found):
        raise ConfigurationError(f"{field}: a {described} is needed (from {path})")
    return found


class YamlModel(BaseModel):
    """What a file says: YAML's true and false, also written as yes, no, on and off, are no numbers."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("a number is needed, not true or false (yes, no, on and off are such in YAML)")
        return value


class _TwiceError(Exception):
    """A mapping has a key twice: one of the two values would silently be lost."""

    def __init__(self, key: str, line: int) -> None:
        super().__init__(f"the key {key!r} is there twice")
        self.line = line


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - the base's
        keys = [(key.value, key.start_mark.line) for key, _ in node.value if key.tag != _MERGE]
        for at, (key, line) in enumerate(keys):
            if isinstance(key, str) and any(key == before for before, _ in keys[:at]):
                raise _TwiceError(key, line + 1)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; {} of an empty one.

    Raises:
        ConfigurationError: it cannot be read, or is no mapping.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe one
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text") from None
    except _TwiceError as error:
        raise ConfigurationError(f"{path} is not valid YAML at line {error.line}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date that there is not
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "")
        told = _BEFORE_QUOTE.sub(r"\1", f": {problem}", count=1).rstrip(": ")
        raise ConfigurationError(f"{path} is not valid YAML{where}{told}") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ConfigurationError(f"{path} must hold a mapping of setting names to values")
    return document


def identity(path: str) -> tuple[int, ...]:
    """Return what differs after any change: of its text, or of the file behind a name or a symbolic link."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
