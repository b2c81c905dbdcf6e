"""The parts of a gateway that all its requests share. Made by `gateway.app` and passed inward."""

from dataclasses import dataclass

from gateway.admission import Admission
from gateway.auth import Keyring
from gateway.drain import Drain, Phase
from gateway.errors import ControlDisabledError
from gateway.fleet import Fleet
from gateway.key_limits import KeyLimits
from gateway.metrics import Metrics
from gateway.setting_types import Scope, is_loopback
from gateway.settings import Settings
from gateway.tally import Number
from gateway.tracing import Tracing
from gateway.upstream import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one running gateway."""

    settings: Settings
    upstream: Upstream
    metrics: Metrics
    admission: Admission
    """Limits generations."""
    tokenizing: Admission
    """Limits tokenizations, which work while the engines are full."""
    body_bytes: Number
    """Bytes of all request bodies that are held."""
    keyring: Keyring
    key_limits: KeyLimits
    drain: Drain
    tracing: Tracing
    fleet: Fleet | None
    """Where other processes serve beside this one."""

    def authorize_admin(self, header: str | None) -> str | None:
        """Check that whoever sent this Authorization header may control models; return the key's name.

        Raises:
            ControlDisabledError: there are no keys, and the gateway is reachable from other machines.
            GatewayError: as `Keyring.authorize`.
        """
        if not (self.settings.api_keys or is_loopback(self.settings.host)):
            raise ControlDisabledError(
                "Without keys, models are controlled from this machine only: add a key with the scope admin."
            )
        return self.keyring.authorize(header, Scope.ADMIN)

    async def exposition(self) -> bytes:
        """Return what Prometheus reads: of every process, where there are several."""
        return self.metrics.render() if self.fleet is None else await self.fleet.render()

    def not_ready(self) -> list[str] | None:
        """Return the models that should be loaded and do not answer; None when no model is known."""
        cards = self.upstream.models()
        return [card.id for card in cards if not (card.ready or card.unloaded)] if cards else None

    def ready(self) -> bool:
        """Whether requests will be served: every model that should be loaded answers, and no drain runs."""
        return self.drain.phase is Phase.SERVING and self.not_ready() == []
