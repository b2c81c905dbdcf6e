"""The gateway's settings: one frozen object, read once and handed inward.

A value comes from, in this order: a command-line flag, a `TRITONGATE_*` environment variable, the YAML file,
the default written here. The name is the same everywhere: field `max_in_flight` is `--max-in-flight`,
`TRITONGATE_MAX_IN_FLIGHT` and the YAML key `max_in_flight`. Units are in the names.

Knows nothing of what the values are used for.
"""

import enum
import importlib.util
import ipaddress
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

ENV_PREFIX = "TRITONGATE_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
_HEADER = re.compile(r"[a-z0-9_.-]+(?<!-bin)=[!-~]([ -~]*[!-~])?")
"""What HTTP/2 carries as a header's name and value; names that end in -bin are for other values."""

OTHER_VARIABLES = frozenset({ENV_PREFIX + "KEY"})
"""Read by the commands that are clients of a gateway."""


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the field and where its value came from."""


class Scope(enum.StrEnum):
    """What a key may do."""

    INFERENCE = "inference"
    ADMIN = "admin"


class ApiKey(BaseModel):
    """A client's key, given in clear or as the SHA-256 of it in hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1, description="what logs call the owner")
    key: SecretStr | None = None
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give exactly one of key and sha256")
        if self.key is not None and not self.key.get_secret_value():
            raise ValueError("the key is empty")
        return self


def _split(value: Any) -> Any:
    """Read a list from one string: `a,b` or a JSON list, as environment variables carry it."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("not a list: neither comma-separated nor JSON") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def _upstream(value: str) -> str:
    """Check `host:port`, or a name as gRPC spells it: `dns:///host:port`, which `dns:host:port` becomes."""
    scheme, _, name = value.partition(":")
    if scheme != "dns" or name.isdigit():
        return _address(value)
    if name.startswith("//") and not name.startswith("///"):
        raise ValueError(
            f"{value!r} names a server to ask; only dns:///host:port is known, which asks the system's"
        )
    return "dns:///" + _address(name.removeprefix("///"))


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"{value!r} is not host:port")
    return value


def _header(value: SecretStr) -> SecretStr:
    if not _HEADER.fullmatch(value.get_secret_value()):
        raise ValueError("not KEY=VALUE, of a KEY in lower case (a-z, 0-9, -, _, .) and printable ASCII")
    return value


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is not a URL of http or https")
    if not _installed("opentelemetry.sdk"):
        raise ValueError("traces need the extra `tracing`: pip install 'tritongate[tracing]'")
    return value


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


Endpoint = Annotated[str, AfterValidator(_endpoint)]
Upstreams = Annotated[
    tuple[Annotated[str, AfterValidator(_upstream)], ...],
    NoDecode,
    BeforeValidator(_split),
    Field(min_length=1),
]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Everything that can be set on the gateway."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    upstreams: Upstreams = Field(
        ("127.0.0.1:8001",),
        description="gRPC addresses of the Tritons, host:port, comma-separated; dns:///host:port is a Triton "
        "at each address that the name has, for as long as it has it",
    )
    resolve_interval_s: float = Field(
        10.0, gt=0, description="seconds between two looks at the addresses of such a name"
    )
    repository_key: Annotated[SecretStr, AfterValidator(_header)] | None = Field(
        None,
        description="what the Tritons ask of who lists, loads or unloads models: KEY=VALUE, as at the end of "
        "their --grpc-restricted-protocol; no flag, since a command line is visible to every process",
        json_schema_extra={"flag": False},
    )
    models: Names = Field(
        (), description="ids of the models to serve; empty serves every entry whose name ends in -stream"
    )
    api_keys: tuple[ApiKey, ...] = Field(
        (),
        description="keys of clients, a list of {name, key or sha256, scopes: [inference, admin]}; no flag, "
        "since a command line is visible to every process",
        json_schema_extra={"flag": False},
    )
    allow_anonymous: bool = Field(
        default=False, description="serve without keys even when bound to more than the loopback interface"
    )
    metrics_need_key: bool = Field(default=False, description="ask for a key, of any scope, at /metrics too")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that serve; bounds of requests are those of all together, and metrics get a "
        "label `worker`",
    )
    max_in_flight: int = Field(
        512,
        ge=1,
        description="answers at work at once, a request counting once for each of its choices; more wait",
    )
    max_waiting: int = Field(512, ge=0, description="requests that may wait; more are refused with a 429")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="largest request body in bytes")
    max_held_body_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="bytes of all request bodies held at once; more are refused with a 429",
    )
    body_timeout_s: float = Field(30.0, gt=0, description="seconds a client may take to send a request body")
    request_timeout_s: float = Field(
        600.0, gt=0, description="seconds from a request's arrival to the end of its answer"
    )
    send_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds a client may leave a piece of a stream unread before it counts as gone",
    )
    idle_timeout_s: float = Field(
        10.0, gt=0, description="seconds without any sign of life from Triton before a request gives it up"
    )
    delta_channel: Literal["auto", "off"] = Field(
        "auto",
        description="auto: streamed answers come over one channel per model and Triton, where the model "
        "offers it; off: each over a stream of its own",
    )
    ping_interval_s: float = Field(15.0, gt=0, description="seconds between comment pings on open streams")
    load_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds that an admin's load may take, or an unload wait for requests in flight",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get to end at shutdown")
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="most new tokens when a request gives no bound; unset is the rest of the context",
    )
    max_choices: int = Field(
        32,
        ge=1,
        le=128,
        description="answers that one request may ask for: n times the number of its prompts",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["json", "text"] = Field(
        "json", description="json: an object a line; text: the same for people, as name=value"
    )
    log_sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of successful requests that get a log line; failed ones always do",
    )
    log_prompts: bool = Field(
        default=False,
        description="add the request's body, prompts and all, up to 16 KiB of it, to its log line",
    )
    trace_endpoint: Endpoint | None = Field(
        None,
        description="URL that traces go to by OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces; unset "
        "records none; needs the extra `tracing`",
    )
    trace_sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests recorded; one with a traceparent is if that says so",
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not (self.api_keys or self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} is reachable from outside and there are no api_keys: "
                "add keys, or set allow_anonymous"
            )
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise ValueError("api_keys: two keys have the same name")
        return self


def revealed(secret: SecretStr | None) -> str | None:
    """Return what `secret` holds, for the one place that needs it."""
    return None if secret is None else secret.get_secret_value()


def is_loopback(host: str) -> bool:
    """Tell whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def unknown_variables() -> list[str]:
    """Return the environment variables with our prefix that set nothing, most likely misspelt.

    Not an error: Kubernetes adds such of its own to every container beside a service of our name.
    """
    known = {row.env for row in settings_table()} | {CONFIG_VARIABLE, *OTHER_VARIABLES}
    return sorted(
        name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One line of the table of settings. `flag` is None where there is none on purpose."""

    name: str
    flag: str | None
    env: str
    default: str
    help: str


def settings_table() -> Iterator[SettingRow]:
    """Describe every setting, in order; README, `--help` and deployments are written or tested from it."""
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        hidden = isinstance(extra, dict) and extra.get("flag") is False
        yield SettingRow(
            name=name,
            flag=None if hidden else "--" + name.replace("_", "-"),
            env=ENV_PREFIX + name.upper(),
            default=_render(field.default),
            help=field.description or "",
        )


def _render(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read the settings from every source.

    Args:
        flags: values given on the command line, by field name; absent ones are left out.
        config: the YAML file; None: the one that TRITONGATE_CONFIG names, or none at all.

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
        # Raised for an environment variable that is not JSON where a list of objects is wanted; the cause
        # may quote a key, so only the field's name, which is in the library's own text, is told.
        field = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "?")
        raise ConfigurationError(
            f"{field}: not valid JSON (from environment variable {ENV_PREFIX}{field.upper()})"
        ) from None


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
    """Word one validation error: field, reason, source."""
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
