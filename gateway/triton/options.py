"""How the models of a pool are served, watched and loaded."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.telemetry.metrics import Metrics
from gateway.triton.dialects import Dialects
from gateway.triton.resolver import Resolve, TlsOf, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """How health is watched; all values in seconds."""

    interval_s: float = 1.0
    """Between probes of a replica that is ready."""
    probe_timeout_s: float = 5.0
    stuck_after_s: float = 60.0
    """An engine whose last loop iteration is older than this is stuck; on a slow CPU a step takes seconds."""
    backoff_first_s: float = 0.25
    backoff_limit_s: float = 1.0
    """Of several gateway processes, one says that it is ready; the others see the Triton so much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandPolicy:
    """How many models are loaded, and for how long."""

    max_loaded: int | None = None
    """On each Triton; None: as many as there are."""
    max_loaded_gib: float | None = None
    """What those on each Triton may take together; None: any amount."""
    gib: Mapping[str, float] = field(default_factory=dict)
    """What each model takes, as far as that is known."""
    min_loaded_s: float = 10.0
    """How long a model stays at least, unless its Triton has too many."""
    unload_idle_s: float | None = None
    """A model without requests for so long is unloaded; None: none is."""
    pinned: Collection[str] = ()
    """Models that are never unloaded."""

    def allows(self, models: Collection[str]) -> bool:
        """Whether a Triton may have these loaded at once."""
        few = self.max_loaded is None or len(models) <= self.max_loaded
        taken = math.fsum(self.gib.get(model, 0.0) for model in models)
        return few and (self.max_loaded_gib is None or taken <= self.max_loaded_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What all parts of a pool have in common."""

    models: Sequence[str] = ()
    """Ids of the models to serve; empty: every entry of a known contract that the Tritons have. A model once
    seen stays listed while its Tritons are down."""
    names: Callable[[str], Sequence[str]] = lambda model: (model,)
    """Returns what a model is called in metrics."""
    metrics: Metrics = field(default_factory=Metrics)
    dialects: Dialects = field(default_factory=Dialects)
    """Make the dialects of the models."""
    health: HealthPolicy = field(default_factory=HealthPolicy)
    on_demand: OnDemandPolicy | None = None
    """How models are loaded that requests ask for; None: they are not."""
    idle_timeout_s: float = 10.0
    """Seconds without any response after which a request gives up its replica."""
    load_timeout_s: float = 600.0
    """Longest load of an entry, and longest wait for requests that delay an unload."""
    upstream_wait_s: float = 0.0
    """How long a request waits while no Triton serves its model."""
    resume: bool = True
    """Answers of models that can are resumed when their server dies."""
    repository_key: str | None = None
    """What the Tritons require for listing, loading and unloading, as KEY=VALUE."""
    warn_of_faults: bool = False
    """Log once which Tritons have published faults."""
    tls_of: TlsOf = lambda _upstream: None
    resolve: Resolve = resolve
    """Looks up a name."""
    resolve_interval_s: float = 10.0
    """Between two lookups of a name while one of its Tritons serves."""
