"""The types of settings that are not just a number or a string, and how each is read from text.

Knows neither where a value came from nor what it is used for.
"""

import enum
import importlib.util
import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)
from pydantic_settings import NoDecode

_HEADER = re.compile(r"[a-z0-9_.-]+(?<!-bin)=[!-~]([ -~]*[!-~])?")
"""KEY=VALUE that HTTP/2 can carry as a header; names that end in -bin are for binary values."""

AUTO: Final = "auto"
_CORES_PER_WORKER: Final = 3
"""Triton, its models and whoever else is on the machine take the others."""
_MOST_WORKERS: Final = 4
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time that this container may have, or `max`, and the period in which it may."""


class Scope(enum.StrEnum):
    """What a key may do."""

    INFERENCE = "inference"
    ADMIN = "admin"


class Contract(enum.StrEnum):
    """The tensors that a model offers to legacy clients of Triton (see `gateway.kserve.contracts`)."""

    BATCHED = "batched"
    """BYTES [rows, 1]; history as JSON."""
    UNBATCHED = "unbatched"
    """Shape [1]; `max_token` and `history_len` INT16."""
    CHATGLM2 = "chatglm2"
    """Shape [1]; history as a flat list q1, a1, q2, a2, ... of any length."""


class ApiKey(BaseModel):
    """A client's key, given in clear text or as its SHA-256 in hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1, description="what logs call the owner")
    key: SecretStr | None = None
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})
    max_in_flight: int | None = Field(
        default=None, ge=1, description="answers in progress or waiting at once"
    )
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1, description="of prompts and answers")

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give exactly one of key and sha256")
        if self.key is not None and not self.key.get_secret_value():
            raise ValueError("the key is empty")
        return self


def _split(value: Any) -> Any:
    """Read a list from a string, as in an environment variable: `a,b` or a JSON list."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("not a list: neither comma-separated nor JSON") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def _upstream(value: str) -> str:
    """Check `host:port`, or a name as gRPC writes it: `dns:///host:port`; `dns:host:port` becomes that."""
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


def _contract(value: str) -> str:
    name, equals, contract = value.rpartition("=")
    if contract not in list(Contract) or (equals and not name):
        raise ValueError(f"{value!r} is not [NAME=]CONTRACT, of a contract {', '.join(Contract)}")
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


def available_cores() -> float:
    """Return how many cores this process may use: those it may run on, or its container's quota if less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroups of version 2, or no quota
        return cores


def _workers(value: Any) -> Any:
    if value != AUTO:
        return value
    return max(1, min(_MOST_WORKERS, int(available_cores() / _CORES_PER_WORKER)))


Workers = Annotated[int, BeforeValidator(_workers)]
"""A number of processes; read from `auto`, one that suits the machine."""
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Upstreams = Annotated[
    tuple[Annotated[str, AfterValidator(_upstream)], ...],
    NoDecode,
    BeforeValidator(_split),
    Field(min_length=1),
]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_split)]
Contracts = Annotated[
    tuple[Annotated[str, AfterValidator(_contract)], ...], NoDecode, BeforeValidator(_split)
]
Header = Annotated[SecretStr, AfterValidator(_header)]


def revealed(secret: SecretStr | None) -> str | None:
    """Return the value of `secret` in clear text; only for the place that uses it."""
    return None if secret is None else secret.get_secret_value()


def is_loopback(host: str) -> bool:
    """Tell whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
