"""The gateway's settings: one frozen object, read once and passed inward.

A field is the whole definition of a setting: name, type, bounds, default and help text. Names include units.
`gateway.configuration` reads the values; nothing here knows what they are used for.
"""

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.setting_types import (
    AUTO,
    ApiKey,
    Contracts,
    Endpoint,
    Header,
    Names,
    Upstreams,
    Workers,
    is_loopback,
)

ENV_PREFIX = "TRITONGATE_"


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

    # Where it listens, and which Tritons it talks to.
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    kserve_http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="second port for HTTP, where Triton's clients look for it; 0 takes a free one; `up` "
        "listens on 8000 if it is unset",
    )
    kserve_grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port for KServe's protocol over gRPC; 0 takes a free one; `up` listens on 8001 if it is "
        "unset",
    )
    upstreams: Upstreams = Field(
        ("127.0.0.1:8001",),
        description="gRPC addresses of the Tritons, host:port, comma-separated; dns:///host:port stands for "
        "a Triton at each address of that name, looked up again and again",
    )
    resolve_interval_s: float = Field(10.0, gt=0, description="seconds between two lookups of such a name")
    repository_key: Header | None = Field(
        None,
        description="key that the Tritons require for listing, loading and unloading models: KEY=VALUE, as "
        "at the end of their --grpc-restricted-protocol; no flag, since a command line is visible to every "
        "process",
        json_schema_extra={"flag": False},
    )
    models: Names = Field(
        (),
        description="ids of the models to serve; empty serves every entry with the inputs of ours",
    )
    contract: Contracts = Field(
        (),
        description="tensors that models offer to clients of Triton: batched, unbatched or chatglm2, for all "
        "or as NAME=CONTRACT, comma-separated; unset: chatglm2 for a ChatGLM2, else batched",
    )
    # Who may use it.
    api_keys: tuple[ApiKey, ...] = Field(
        (),
        description="clients' keys: a list of {name, key or sha256, scopes: [inference, admin], "
        "max_in_flight, requests_per_minute, tokens_per_minute}; no flag, "
        "since a command line is visible to every process",
        json_schema_extra={"flag": False},
    )
    allow_anonymous: bool = Field(
        default=False, description="serve without keys even when bound to more than the loopback interface"
    )
    metrics_need_key: bool = Field(default=False, description="require a key, of any scope, for /metrics too")
    # How much at once.
    workers: Workers = Field(
        AUTO,
        ge=1,
        le=64,
        validate_default=True,
        description="number of gateway processes; auto: one for every three cores, at most 4; limits on "
        "requests apply to all of them together, and the metrics of several have a label `worker`",
    )
    max_in_flight: int = Field(
        512,
        ge=1,
        description="answers in progress at once; a request counts once for each of its choices; more wait",
    )
    max_waiting: int = Field(512, ge=0, description="requests that may wait; more are refused with a 429")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="largest request body in bytes")
    max_held_body_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="bytes of all request bodies held at once; more are refused with a 429",
    )
    # How long.
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
        10.0, gt=0, description="seconds without any sign of life from Triton before a request gives up on it"
    )
    ping_interval_s: float = Field(15.0, gt=0, description="seconds between comment pings on open streams")
    load_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds that an admin's load may take, or an unload wait for requests in flight",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests have to finish at shutdown")
    # What one request gets.
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="limit on new tokens when a request sets none; unset: the rest of the context",
    )
    strict: bool = Field(
        default=False,
        description="refuse fields of requests that have no effect; otherwise they are accepted, and the "
        "answer's header x-tritongate-ignored names them",
    )
    max_choices: int = Field(
        32,
        ge=1,
        le=128,
        description="answers that one request may ask for: n times the number of its prompts",
    )
    # What it reports: logs and traces.
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level logged")
    log_format: Literal["json", "text"] = Field(
        "json", description="json: one object per line; text: the same for people, as name=value"
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
        description="URL to which traces are sent by OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces; "
        "unset: none are recorded; needs the extra `tracing`",
    )
    trace_sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests recorded; a traceparent's own sampled flag decides instead",
    )

    def http_ports(self) -> list[int]:
        """Return the ports to listen on for HTTP, its own first."""
        return [self.port, *([] if self.kserve_http_port is None else [self.kserve_http_port])]

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not (self.api_keys or self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} is reachable from outside and there are no api_keys: "
                "add keys, or set allow_anonymous"
            )
        ports = [self.port, self.kserve_http_port, self.kserve_grpc_port]
        taken = [port for port in ports if port]
        if len(set(taken)) < len(taken):
            raise ValueError("port, kserve_http_port and kserve_grpc_port must differ")
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise ValueError("api_keys: two keys have the same name")
        return self
