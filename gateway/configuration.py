"""Where settings come from, and how they are described.

A command-line flag overrides a `TRITONGATE_*` environment variable, which overrides the YAML file, which
overrides the default. The name is the same everywhere: field `max_in_flight` is `--max-in-flight`,
`TRITONGATE_MAX_IN_FLIGHT` and the YAML key `max_in_flight`. Knows no setting by name.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from gateway.settings import ENV_PREFIX, Settings

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

OTHER_VARIABLES = frozenset({ENV_PREFIX + "KEY"})
"""Variables read by the commands that are clients of a gateway; they are not settings."""


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the field and where its value came from."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One row of the table of settings. `flag` is None for settings that deliberately have none."""

    name: str
    flag: str | None
    env: str
    default: str
    help: str
    many: bool = False
    """The value is a list; the flag may be repeated."""


def settings_table() -> Iterator[SettingRow]:
    """Describe every setting, in order; `--help`, README and deployments are made from it or tested by it."""
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        hidden = isinstance(extra, dict) and extra.get("flag") is False
        yield SettingRow(
            name=name,
            flag=None if hidden else "--" + name.replace("_", "-"),
            env=ENV_PREFIX + name.upper(),
            default=_render(field.default),
            help=field.description or "",
            many=isinstance(field.default, tuple),
        )


def _render(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def unknown_variables() -> list[str]:
    """Return the environment variables with our prefix that set nothing; they are probably misspelt.

    Not an error: Kubernetes adds such variables to every container beside a service with our name.
    """
    known = {row.env for row in settings_table()} | {CONFIG_VARIABLE, *OTHER_VARIABLES}
    return sorted(
        name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read the settings from every source.

    Args:
        flags: the values given on the command line, by field name.
        config: the YAML file; None: the one named by TRITONGATE_CONFIG, if any.

    Raises:
        ConfigurationError: an unreadable file, an unknown key, or a value that is not allowed.
    """
    given = dict(flags or {})
    path = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    document = _read_yaml(path) if path else {}

    class FromAll(Settings):
        """The settings with the file of this call as their last source."""

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is the library's
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is the library's
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=document)

    try:
        return FromAll(**given)
    except ValidationError as error:
        raise ConfigurationError(
            "\n".join(_explain(detail, given, path) for detail in error.errors(include_input=False))
        ) from None
    except SettingsError as error:
        # Raised for an environment variable that is not JSON where a list of objects is expected. The cause
        # may quote a key, so only the field's name, which is in the library's own text, is reported.
        field = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "?")
        raise ConfigurationError(
            f"{field}: not valid JSON (from environment variable {ENV_PREFIX}{field.upper()})"
        ) from None


def restore_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings with exactly these values, whatever the environment and the file say by now.

    Raises:
        pydantic.ValidationError: they are not those of settings.
    """

    class FromValues(Settings):
        """The settings without any other source."""

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is the library's
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings,)

    return FromValues(**values)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        # The error's own text quotes the line, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{path} is not valid YAML{where}") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ConfigurationError(f"{path} must hold a mapping of setting names to values")
    return document


def _explain(detail: Any, flags: Mapping[str, Any], path: Path | None) -> str:
    """Describe one validation error: field, reason, source."""
    location = detail["loc"]
    if not location:
        return str(detail["msg"]).removeprefix("Value error, ")
    field = str(location[0])
    dotted = ".".join(str(part) for part in location)
    row = next((row for row in settings_table() if row.name == field), None)
    if row is None:
        return f"{dotted}: unknown setting (from {path})"
    if field in flags:
        source = f"flag {row.flag}"
    elif row.env in {name.upper() for name in os.environ}:
        source = f"environment variable {row.env}"
    else:
        source = str(path)
    reason = "unknown key" if detail["type"] == "extra_forbidden" else str(detail["msg"])
    return f"{dotted}: {reason.removeprefix('Value error, ')} (from {source})"
