"""What every request of one app shares. Made by `gateway.app`, handed inward."""

from dataclasses import dataclass

from gateway.admission import Admission
from gateway.auth import Keyring
from gateway.drain import Drain
from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.upstream import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one running gateway."""

    settings: Settings
    upstream: Upstream
    metrics: Metrics
    admission: Admission
    keyring: Keyring
    drain: Drain
