"""What settings must not say together: what is open to more people than is meant, and what cannot work."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gateway.settings.certificates import check_pair
from gateway.settings.models import ModelSettings, contradictions, public_name
from gateway.settings.values import is_local, is_loopback

if TYPE_CHECKING:
    from gateway.settings import Settings


def faults_of(settings: "Settings") -> Iterator[str]:
    """Yield what is wrong, each with the names of the settings, and what to do."""
    if not (settings.api_keys or settings.allow_anonymous or is_loopback(settings.host)):
        yield (
            f"host {settings.host} is reachable from outside and there are no api_keys: "
            "give keys with --keys-file FILE or in TRITONGATE_API_KEYS (`up`: --api-key KEY), "
            "or let everybody in with --allow-anonymous"
        )
    if not settings.load_on_demand and (
        settings.max_loaded_models
        or settings.max_loaded_gib
        or settings.unload_idle_s
        or settings.pinned_models
    ):
        yield (
            "max_loaded_models, max_loaded_gib, unload_idle_s and pinned_models need load_on_demand: "
            "nothing else loads a model again"
        )
    ports = settings.ports()
    if len(set(ports)) < len(ports):
        yield "port, kserve_http_port, kserve_grpc_port and that of metrics_address must differ"
    yield from _unprotected(settings)
    models = {name: settings.model(name) for name in settings.models}
    # Keys of a file come and go: a model for none of them is for nobody.
    names = None if settings.keys_file else {key.name for key in settings.api_keys}
    yield from contradictions(models, names)
    for adapter, _, name in (each.rpartition("=") for each in settings.adapters if models):
        if public_name(models, adapter) == adapter:
            yield f"adapters: {adapter!r} is a model already"
        if public_name(models, name) is None:
            yield f"adapters: {adapter!r} is for {name!r}, which is no model"
    if settings.max_loaded_gib is not None:
        yield from _unmeasured(models, settings.max_loaded_gib)


def _unmeasured(models: Mapping[str, ModelSettings], limit: float) -> Iterator[str]:
    """Yield whose memory is not known, or more than a Triton may have loaded."""
    if not models:
        yield "max_loaded_gib needs models with their memory_gib"
    for name, model in models.items():
        if model.memory_gib is None:
            yield f"models.{name}.memory_gib: max_loaded_gib needs it"
        elif model.memory_gib > limit:
            yield f"models.{name}.memory_gib: more than max_loaded_gib allows at all"


def _unprotected(settings: "Settings") -> Iterator[str]:
    """Yield what would travel in clear text and must not, and half of a pair of files."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        yield "tls_cert and tls_key go together"
    for upstream in settings.all_upstreams():
        try:
            tls = settings.tls_of(upstream)
        except ValueError as error:
            yield str(error)
            continue
        if (
            tls is None
            and settings.repository_key
            and not (settings.plain_repository_key or is_local(upstream))
        ):
            yield (
                f"repository_key: it would go to {upstream} in clear text: set upstream_ca, for TLS, "
                "or plain_repository_key, if nobody else is on that network"
            )


def check_certificates(settings: "Settings") -> None:
    """Check the files of certificates, as a gateway starts.

    No part of what settings must say: these files change while it runs, and must stop neither a worker that
    is replaced nor a change of keys.

    Raises:
        ValueError: some cannot be used, or are for no upstream; the message names the file, or the upstream.
    """
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_pair(settings.tls_cert, settings.tls_key)
    upstreams = settings.all_upstreams()
    for field in ("upstream_ca", "upstream_cert", "upstream_key"):
        for name in (each.rpartition("=")[0] for each in getattr(settings, field)):
            if name and name not in upstreams:  # and the one that is meant would be spoken to without
                raise ValueError(f"{field}: no upstream is {name}; there are: {', '.join(upstreams)}")
    for upstream in upstreams:
        if (tls := settings.tls_of(upstream)) is not None:
            tls.read()
