"""What settings are made of: their types, and how each is read and checked."""

import enum
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from gateway.settings.files import YamlModel

T = TypeVar("T")

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_HEADER = re.compile(r"[a-z0-9_.-]+(?<!-bin)=[!-~]([ -~]*[!-~])?")
"""KEY=VALUE that HTTP/2 can carry as a header; names that end in -bin are for binary values."""

_BRACKETS = re.compile(r"\s*\[[0-9A-Fa-f:.]+(%\w+)?\]:")
"""The address of IPv6 that begins a list of `host:port`, which is no JSON."""

AUTO: Final = "auto"
_CORES_PER_WORKER: Final = 3
"""Triton, its models and whoever else is on the machine take the others."""
_MOST_WORKERS: Final = 4
KEYS_LIMIT: Final = 4096
TOKENS_PER_DAY_LIMIT: Final = 2**40 - 1
"""What processes share of a day's tokens is one word of 64 bits, with the day."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time that this container may have, or `max`, and the period in which it may."""


class Scope(enum.StrEnum):
    """What a key may do."""

    INFERENCE = "inference"
    ADMIN = "admin"
    METRICS = "metrics"


class Contract(enum.StrEnum):
    """The tensors that a model offers to legacy clients of Triton (see `gateway.kserve.contracts`)."""

    BATCHED = "batched"
    """BYTES [rows, 1]; history as JSON."""
    UNBATCHED = "unbatched"
    """Shape [1]; `max_token` and `history_len` INT16."""
    FLAT = "chatglm2"
    """Shape [1]; history as a flat list q1, a1, q2, a2, ... of any length."""
    LOGITS = "logits"
    """No conversation: ids in, logits out, for clients that choose tokens (`gateway.kserve.logits`)."""


def split(value: Any) -> Any:
    """Read a list from a string, as in an environment variable: `a,b` or a JSON list."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("[") and not _BRACKETS.match(value):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("not a list: neither comma-separated nor JSON") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def _upstream(value: str) -> str:
    """Check `host:port`, or a name as gRPC writes it: `dns:///host:port`; `dns:host:port` becomes that."""
    scheme, _, name = value.partition(":")
    if scheme != "dns" or name.isdigit():
        return _target(value)
    if name.startswith("//") and not name.startswith("///"):
        raise ValueError(
            f"{value!r} names a server to ask; only dns:///host:port is known, which asks the system's"
        )
    return "dns:///" + _target(name.removeprefix("///"))


def _target(value: str) -> str:
    # gRPC takes a URL for a name, and `::1:8001` for an address without a port.
    if "/" in value:
        raise ValueError(
            f"{value!r} is not host:port: leave out http:// and any path; Triton's gRPC port is usually 8001"
        )
    host = _address(value).rpartition(":")[0]
    if ":" in host and not host.startswith("["):
        raise ValueError(f"{value!r} is not host:port, with an IPv6 address in brackets")
    return value


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"{value!r} is not host:port")
    return value


def _file(value: str) -> str:
    upstream, equals, path = value.rpartition("=")
    if not Path(path).is_file() or (equals and not upstream):
        raise ValueError(f"{value!r} is not [UPSTREAM=]FILE, of a file that exists")
    return f"{_upstream(upstream)}={path}" if upstream else path


def _header(value: SecretStr) -> SecretStr:
    if not _HEADER.fullmatch(value.get_secret_value()):
        raise ValueError("not KEY=VALUE, of a KEY in lower case (a-z, 0-9, -, _, .) and printable ASCII")
    return value


def _digest(value: str) -> str:
    if not _DIGEST.fullmatch(value):  # it may be a key, which is not to be repeated
        raise ValueError("64 hexadecimal digits are needed, as sha256sum prints them")
    return value


def _contract(value: str) -> str:
    name, equals, contract = value.rpartition("=")
    if contract not in list(Contract) or (equals and not name):
        raise ValueError(f"{value!r} is not [NAME=]CONTRACT, of a contract {', '.join(Contract)}")
    return value


def _folder(value: str) -> str:
    name, equals, folder = value.rpartition("=")
    if not Path(folder).is_dir() or (equals and not name):
        raise ValueError(f"{value!r} is not [NAME=]FOLDER, of a folder that exists")
    return value


def tokenizer_folder(value: str) -> str:
    """Check that `value` is a folder."""
    if not Path(value).is_dir():
        raise ValueError(f"{value!r} is no folder")
    return value


def _origin(value: str) -> str:
    """Check what browsers send as `Origin`: no path, not even a slash, and everything in lower case."""
    origin = value.lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{value!r} is not https://host[:port], of one host, nor * for all")
    return origin


def _host(value: str) -> str:
    """Check a name as the header `Host` has it but for the port; it is compared in lower case."""
    host = value.lower().removesuffix(".")
    if not (_HOST.fullmatch(host) or is_address(host)):
        raise ValueError(f"{value!r} is not a name, without scheme and port, nor *.example.org, nor *")
    return host


def _adapter(value: str) -> str:
    name, _, entry = value.rpartition("=")
    if not name or not entry or name == entry:
        raise ValueError(f"{value!r} is not NAME=ENTRY, of two names")
    return value


def _one_entry_each(values: tuple[str, ...]) -> tuple[str, ...]:
    _check_differ("adapters", (value.rpartition("=")[0] for value in values))
    return values


def _check_differ(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"two {what} have the name {name!r}")


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is not a URL of http or https")
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ValueError("traces need the extra `tracing`: in the clone, pip install '.[tracing]'")
    return value


def available_cores() -> float:
    """Return how many cores this process may use: those it may run on, or its container's quota if less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroups of version 2, or no quota
        return cores


def _workers(value: Any) -> Any:
    if isinstance(value, str) and value != AUTO and not value.strip().lstrip("+-").isdecimal():
        raise ValueError(f"a whole number or {AUTO} is needed")
    if value != AUTO:
        return value
    return max(1, min(_MOST_WORKERS, int(available_cores() / _CORES_PER_WORKER)))


Workers = Annotated[int, BeforeValidator(_workers)]
"""A number of processes; read from `auto`, one that suits the machine."""
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Listed = Annotated[tuple[T, ...], NoDecode, BeforeValidator(split)]
Upstreams = Listed[Annotated[str, AfterValidator(_upstream)]]
Address = Annotated[str, AfterValidator(_address)]
Files = Listed[Annotated[str, AfterValidator(_file)]]
Names = Listed[Annotated[str, Field(min_length=1)]]
Hosts = Listed[Annotated[str, AfterValidator(_host)]]
Origins = Listed[Annotated[str, AfterValidator(_origin)]]
Digests = Annotated[
    tuple[Annotated[str, AfterValidator(_digest)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1),
]
Contracts = Listed[Annotated[str, AfterValidator(_contract)]]
Folders = Listed[Annotated[str, AfterValidator(_folder)]]
Adapters = Annotated[Listed[Annotated[str, AfterValidator(_adapter)]], AfterValidator(_one_entry_each)]
Header = Annotated[SecretStr, AfterValidator(_header)]


class ApiKey(YamlModel):
    """A client's key, given in clear text or as its SHA-256 in hexadecimal; of the latter perhaps several."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1, description="what logs call the owner")
    key: SecretStr | None = None
    sha256: Digests | None = None
    """Several while clients go over to a new key."""
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})
    models: Names = Field(default=(), description="public names of the models it may use; none: all")
    max_in_flight: int | None = Field(
        default=None, ge=1, description="answers in progress or waiting at once"
    )
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1, description="of prompts and answers")
    tokens_per_day: int | None = Field(
        default=None, ge=1, le=TOKENS_PER_DAY_LIMIT, description="the same, from midnight to midnight UTC"
    )

    def hashed(self) -> Self:
        """Return the same without its clear text."""
        return self.model_copy(update={"key": None, "sha256": tuple(each.hex() for each in self.digests())})

    def digests(self) -> tuple[bytes, ...]:
        """Return the SHA-256 of each text that is this key."""
        if self.key is not None:
            return (hashlib.sha256(self.key.get_secret_value().encode()).digest(),)
        return tuple(map(bytes.fromhex, self.sha256 or ()))

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give exactly one of key and sha256")
        text = revealed(self.key)
        if text == "":
            raise ValueError("the key is empty")
        if text is not None and text != text.strip():
            raise ValueError("the key begins or ends with white space, which a header does not carry")
        return self


def _one_owner_each(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    _check_differ("keys", (key.name for key in keys))
    owners: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests():
            if owners.setdefault(digest, key.name) != key.name:
                raise ValueError(f"{owners[digest]!r} and {key.name!r} are one key: nobody could tell whose")
    return keys


ApiKeys = Annotated[tuple[ApiKey, ...], Field(max_length=KEYS_LIMIT), AfterValidator(_one_owner_each)]


def revealed(secret: SecretStr | None) -> str | None:
    """Return the value of `secret` in clear text; only for the place that uses it."""
    return None if secret is None else secret.get_secret_value()


def of_name(values: Iterable[str], *names: str) -> str | None:
    """Return the value for the first of `names` that has one, of NAME=VALUE, or else the one for all."""
    named = {each: value for each, _, value in (text.rpartition("=") for text in values)}
    return next((named[name] for name in (*names, "") if named.get(name)), None)


def is_service_link(value: object) -> bool:
    """Tell whether an environment variable's value is what Kubernetes, or Docker, tells of a service.

    Beside a service `tritongate`, every container has `TRITONGATE_PORT=tcp://10.96.0.1:8080`.
    """
    return isinstance(value, str) and value.startswith(("tcp://", "udp://", "sctp://"))


def is_local(upstream: str) -> bool:
    """Tell whether an upstream is on this machine."""
    return is_loopback(upstream.removeprefix("dns:///").rpartition(":")[0])


def is_address(host: str) -> bool:
    """Tell whether `host` is an IP address, perhaps in brackets, rather than a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback
