"""The gateway's settings: one frozen object, read once and passed inward.

A field is the whole definition of a setting: name, type, bounds, default and help text. Names include units,
and are the same everywhere: `max_in_flight` is `--max-in-flight`, `TRITONGATE_MAX_IN_FLIGHT` and the YAML key
`max_in_flight`. A flag overrides a variable, which overrides the YAML file, which overrides the default.
Nothing here knows what the values are used for.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from gateway.settings.certificates import TlsFiles
from gateway.settings.files import ConfigurationError as ConfigurationError
from gateway.settings.files import YamlModel, read_field, read_yaml
from gateway.settings.guards import check_certificates, faults_of
from gateway.settings.models import Models, ModelSettings
from gateway.settings.values import (
    AUTO,
    Adapters,
    Address,
    ApiKeys,
    Contract,
    Contracts,
    Endpoint,
    Files,
    Folders,
    Header,
    Hosts,
    Names,
    Origins,
    Upstreams,
    Workers,
    is_service_link,
    of_name,
)
from gateway.settings.wording import reason_of, unknown, without_consequences

ENV_PREFIX: Final = "TRITONGATE_"
CONFIG_VARIABLE: Final = ENV_PREFIX + "CONFIG"
OTHER_VARIABLES: Final = {CONFIG_VARIABLE, ENV_PREFIX + "KEY"}
"""Variables with our prefix that are no settings; KEY is for commands that are clients of a gateway."""
FILE_OF: Final = {"models": "models_file", "api_keys": "keys_file"}
"""For each setting that may stand in a file of its own, the setting that names that file."""


class Settings(YamlModel, BaseSettings):
    """Everything that can be set on the gateway; made by `load_settings`, or of the values given alone."""

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
        "listens on 8000 if it is unset and no other port is that",
    )
    kserve_grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port for KServe's protocol over gRPC; 0 takes a free one; `up` listens on 8001 if it is "
        "unset and no other port is that",
    )
    tls_cert: str | None = Field(
        None,
        description="PEM file with the certificate for TLS, on every port, and those between it and the "
        "root; followed while the gateway runs; unset: plain HTTP and gRPC",
    )
    tls_key: str | None = Field(None, description="PEM file with its private key")
    metrics_address: Address | None = Field(
        None, description="host:port that serves /metrics alone, without a key, for a network of operators"
    )
    upstreams: Upstreams = Field(
        ("127.0.0.1:8001",),
        min_length=1,
        description="gRPC addresses of the Tritons, host:port, comma-separated; dns:///host:port stands for "
        "a Triton at each address of that name, looked up again and again",
    )
    upstream_ca: Files = Field(
        (),
        description="PEM file with the roots for TLS to the Tritons, for all or as UPSTREAM=FILE, "
        "comma-separated; unset: plain gRPC; names and addresses are verified",
    )
    upstream_cert: Files = Field(
        (), description="the gateway's own certificate for such Tritons (mutual TLS), likewise"
    )
    upstream_key: Files = Field((), description="private key of that certificate, likewise")
    resolve_interval_s: float = Field(10.0, gt=0, description="seconds between two lookups of such a name")
    repository_key: Header | None = Field(
        None,
        description="key that the Tritons require for listing, loading and unloading models: KEY=VALUE, as "
        "at the end of their --grpc-restricted-protocol; no flag, since a command line is visible to every "
        "process",
        json_schema_extra={"flag": False},
    )
    plain_repository_key: bool = Field(
        default=False,
        description="send repository_key to Tritons on other machines without TLS, on a network that nobody "
        "else is on",
    )
    models: Models = Field(
        (),
        validate_default=True,
        description="names of the models in Triton to serve, comma-separated; empty: every one whose inputs "
        "the gateway knows (ours, vLLM's, TensorRT-LLM's, embedding models); in YAML, or as JSON, also "
        "a mapping of public names, as in a models_file",
    )
    models_file: str | None = Field(
        None,
        description="YAML file whose `models` maps public names to what is set for each; followed while the "
        "gateway runs, as is a configuration file with such a mapping",
    )
    contract: Contracts = Field(
        (),
        description="tensors that models offer to clients of Triton: batched, unbatched, chatglm2 or logits, "
        "for all or as NAME=CONTRACT, comma-separated; unset: chatglm2 for a ChatGLM2, else batched",
    )
    tokenizers: Folders = Field(
        (),
        description="folders with the tokenizer.json and the chat template of models that send none (vLLM, "
        "TensorRT-LLM), or in place of those that our engine sends, for all or as NAME=FOLDER, "
        "comma-separated",
    )
    adapters: Adapters = Field(
        (),
        description="LoRA adapters of models of the vLLM backend, each served as a model of its own: "
        "NAME=ENTRY, of its name in multi_lora.json and the model's; comma-separated",
    )
    # Which of the models are loaded.
    load_on_demand: bool = Field(
        default=False,
        description="load a model that is not loaded when a request needs it; the request waits",
    )
    max_loaded_models: int | None = Field(
        None,
        ge=1,
        description="of the models served, how many a Triton may have loaded; for one more, the one unused "
        "the longest is unloaded; unset: no limit",
    )
    max_loaded_gib: float | None = Field(
        None,
        gt=0,
        description="how many GiB of the models served a Triton may have loaded, by the `memory_gib` of each "
        "model; for one more, those unused the longest are unloaded until it fits; unset: no limit",
    )
    min_loaded_s: float = Field(
        10.0, ge=0, description="seconds that a model stays loaded before it may make room for another one"
    )
    unload_idle_s: float | None = Field(
        None, gt=0, description="seconds without requests after which a model is unloaded; unset: never"
    )
    pinned_models: Names = Field(
        (), description="ids of models that are unloaded neither to make room nor idle"
    )
    # Who may use it.
    api_keys: ApiKeys = Field(
        (),
        description="clients' keys: a list of {name, key or sha256, scopes: [inference, admin, metrics], "
        "models, max_in_flight, requests_per_minute, tokens_per_minute, tokens_per_day}; no flag, "
        "since a command line is visible to every process, but `up` has --api-key for a single one",
        json_schema_extra={"flag": False},
    )
    keys_file: str | None = Field(
        None,
        description="YAML file whose `api_keys` lists clients' keys, followed while the gateway runs: keys "
        "come, change and go without a restart",
    )
    allow_anonymous: bool = Field(
        default=False, description="serve without keys even when bound to more than the loopback interface"
    )
    allowed_hosts: Hosts = Field(
        (),
        description="names that clients may call it by, *.example.org for all that end so, * for any; "
        "comma-separated; loopback names and IP addresses always may; unset: only those where it serves its "
        "own machine without keys, else any",
    )
    cors_origins: Origins = Field(
        (),
        description="web pages of other sites that may use the gateway, as https://host[:port], * for all, "
        "comma-separated; unset: none",
    )
    chat_page: bool = Field(default=True, description="serve the chat page at /")
    metrics_need_key: bool = Field(
        default=False,
        description="require a key with the scope metrics for /metrics on a loopback address, too; beyond "
        "loopback it is needed wherever there are keys",
    )
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
        description="answers in progress at once; a request counts once for each of its choices; more wait; "
        "`up` has the default for each of its Tritons",
    )
    max_waiting: int = Field(512, ge=0, description="requests that may wait; more are refused with a 429")
    max_connections: int = Field(
        4096,
        ge=1,
        description="connections open at once, of all processes together; on a few more, health and metrics "
        "are answered and all else gets a 503; gRPC's are counted apart, by each process",
    )
    logits_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        le=2**30,
        description="bytes of logits that answers with the contract `logits` may hold at once, of all "
        "processes together; one that needs more is refused with a 400, others wait their turn",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="largest request body in bytes")
    max_held_body_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="bytes that all request bodies held at once may take, as they came and as they were read "
        "(text once to four times, token ids eight times); more are refused with a 429",
    )
    # How long.
    body_timeout_s: float = Field(30.0, gt=0, description="seconds a client may take to send a request body")
    request_timeout_s: float = Field(
        600.0, gt=0, description="seconds from a request's arrival to the end of its answer"
    )
    send_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds a client may leave an answer unread before it counts as gone and its "
        "connection ends",
    )
    idle_connection_s: float = Field(
        75.0, gt=0, description="seconds until an idle connection is closed: more than a balancer keeps one"
    )
    idle_timeout_s: float = Field(
        10.0, gt=0, description="seconds without any sign of life from Triton before a request gives up on it"
    )
    resume: bool = Field(
        default=True,
        description="an answer whose Triton dies goes on at another one, or there once it is back; off: it "
        "ends with an error",
    )
    upstream_wait_s: float = Field(
        0.0,
        ge=0,
        description="seconds that a request waits for a Triton with its model while none answers: until an "
        "autoscaler has started the first one, or one that died is back; 0: a 503 at once",
    )
    ping_interval_s: float = Field(15.0, gt=0, description="seconds between comment pings on open streams")
    load_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds that an admin's load may take, or an unload wait for requests in flight",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds to finish requests at shutdown (`up`: at most 5)")
    # What one request gets.
    default_max_tokens: int | None = Field(
        None, ge=1, description="limit on new tokens when a request sets none; unset: the rest of the context"
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
    warn_of_faults: bool = Field(
        default=True,
        description="log a warning about Tritons whose version has published faults, and about "
        "gateways in their place",
    )
    vllm_metrics: bool = Field(
        default=False,
        description="report metrics under vLLM's names too (vllm:num_requests_waiting, ...), for autoscalers "
        "and dashboards that read those",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level logged")
    log_format: Literal["json", "text", "plain"] = Field(
        "json",
        description="json: one object per line; text: the same for people, as name=value; plain: warnings, "
        "and a line with its reason for each request that failed",
    )
    log_sample: float = Field(
        1.0, ge=0, le=1, description="share of successful requests that get a log line; failed ones always do"
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

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing but what is given."""
        return (sources["init_settings"],)

    def tls_of(self, upstream: str) -> TlsFiles | None:
        """Return how to speak TLS to an upstream; None: it is spoken to without.

        Raises:
            ValueError: the settings say too little for it.
        """
        ca, cert, key = (
            of_name(values, upstream) for values in (self.upstream_ca, self.upstream_cert, self.upstream_key)
        )
        if (cert is None) != (key is None):
            raise ValueError(f"upstream {upstream}: upstream_cert and upstream_key go together")
        if ca is None:
            if cert is not None:
                raise ValueError(f"upstream {upstream}: with upstream_cert, upstream_ca is needed, too")
            return None
        return TlsFiles(ca, cert, key)

    def ports(self) -> list[int]:
        """Return the ports that it listens on, but those that the kernel chooses."""
        ports = [self.port, self.kserve_http_port, self.kserve_grpc_port]
        if self.metrics_address is not None:
            ports.append(int(self.metrics_address.rpartition(":")[2]))
        return [port for port in ports if port]

    def all_upstreams(self) -> tuple[str, ...]:
        """Return the Tritons of all models; of those settings where no model is named."""
        models = [self.model(name) for name in self.models]
        return tuple(dict.fromkeys(each for model in models for each in model.upstreams)) or self.upstreams

    def model(self, name: str) -> ModelSettings:
        """Return how a public name is served, with what all models have in common filled in."""
        given = self.models.get(name) or ModelSettings(entry=name)
        contract = of_name(self.contract, name, given.entry)
        return given.model_copy(
            update={
                "upstreams": given.upstreams or self.upstreams,
                "tokenizer": given.tokenizer or of_name(self.tokenizers, given.entry, name),
                "contract": given.contract or (Contract(contract) if contract else None),
            }
        )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if faults := list(faults_of(self)):
            raise ValueError("\n".join(faults))
        return self


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
    """Describe every setting, in order; help, documents and deployments are made from it or tested by it."""
    for name, field in Settings.model_fields.items():
        default = field.default
        if isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, tuple):
            default = ",".join(default)
        yield SettingRow(
            name=name,
            flag=None if field.json_schema_extra else "--" + name.replace("_", "-"),
            env=ENV_PREFIX + name.upper(),
            default="" if default is None else str(default),
            help=field.description or "",
            many=isinstance(field.default, tuple),
        )


def unknown_variables() -> list[str]:
    """Return the environment variables with our prefix that set nothing: misspelt, or of Kubernetes."""
    known = {row.env for row in settings_table()} | OTHER_VARIABLES
    ours = {name: value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}
    return sorted(name for name in ours if name.upper() not in known or is_service_link(ours[name]))


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read the settings from every source.

    Args:
        flags: the values given on the command line, by field name.
        config: the YAML file; None: the one named by TRITONGATE_CONFIG, if any.

    Raises:
        ConfigurationError: an unreadable file, an unknown key, or a value that is not allowed.
    """
    path = config or os.environ.get(CONFIG_VARIABLE)
    sources = {str(path): read_yaml(Path(path)) if path else {}}
    try:
        found = EnvSettingsSource(Settings)().items()
        sources["environment variable"] = {name: each for name, each in found if not is_service_link(each)}
    except SettingsError as error:
        # It is not JSON where a list of objects is expected. The cause may quote a key, so only the field's
        # name, which is in the library's own text, is reported.
        field = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "?")
        raise ConfigurationError(
            f"{field}: not valid JSON (from environment variable {ENV_PREFIX}{field.upper()})"
        ) from None
    sources["flag"] = dict(flags or {})
    values = {name: value for source in sources.values() for name, value in source.items()}
    models = values.get("models")
    for name, named in FILE_OF.items():
        file = values.get(named)
        if values.get(name) and file:
            raise ConfigurationError(f"{name}: the {named} {file} has them; give one of the two")
        if isinstance(file, str):
            sources[file] = {name: read_field(file, name)}
            values |= sources[file]
    if path and isinstance(models, Mapping):
        values["models_file"] = str(path)
        if not models:
            raise ConfigurationError(f"models: no public name is there (from {path})")
    settings = _checked(values, sources)
    try:
        check_certificates(settings)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return settings


def reload(settings: Settings, name: str) -> Settings:
    """Read the file of `models` or of `api_keys` again; return the settings with what it says now.

    Raises:
        ConfigurationError: it cannot be used; the message names every fault.
    """
    path = getattr(settings, FILE_OF[name]) or ""
    # That of the models may be the configuration file.
    found = {name: read_field(path, name, Settings.model_fields if name == "models" else ())}
    return _checked(dict(settings) | found, {"setting": dict(settings), path: found})


def _checked(values: dict[str, Any], sources: dict[str, dict[str, Any]]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        faults = without_consequences(error.errors(include_input=False))
        raise ConfigurationError("\n".join(_explain(fault, sources) for fault in faults)) from None


def _explain(fault: Any, sources: dict[str, dict[str, Any]]) -> str:
    """Describe one validation error: field, reason, source."""
    reason = reason_of(fault)
    if not fault["loc"]:
        return reason  # it names the fields itself
    field, dotted = fault["loc"][0], ".".join(map(str, fault["loc"]))
    source = next(name for name, values in reversed(sources.items()) if field in values)
    if fault["type"] == "extra_forbidden":
        reason = unknown(fault["loc"], Settings)
    row = next((row for row in settings_table() if row.name == field), None)
    names = {"flag": f" {row.flag or '--api-key'}", "environment variable": f" {row.env}"} if row else {}
    return f"{dotted}: {reason} (from {source}{names.get(source, '')})"
