"""What every router is given: the engine, the model once there is one, the door's options, the metrics."""

from dataclasses import dataclass

from tightwire.server.config import HttpOptions
from tightwire.server.engine_client import EngineClient, Phase
from tightwire.server.errors import unavailable
from tightwire.server.metrics import Metrics
from tightwire.server.served_model import ModelSlot, ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    engine: EngineClient
    slot: ModelSlot
    http: HttpOptions
    metrics: Metrics

    @property
    def status(self) -> tuple[Phase, str]:
        """The engine's phase and reason; it is not ready before the tokenizer is."""
        state = self.engine.state
        if state.phase is Phase.READY and self.slot.model is None:
            return Phase.LOADING, "tokenizer"
        return state.phase, state.reason

    def require_model(self) -> ServedModel:
        """The model, for routes that do not need the engine to take new work.

        Raises:
            ApiError: 503 while it loads, or after the engine died.
        """
        phase, reason = self.status
        model = self.slot.model
        if model is None or phase in (Phase.LOADING, Phase.DEAD):
            raise unavailable(_describe(phase, reason))
        return model

    def require_ready(self) -> ServedModel:
        """The model, when the engine would answer. Raises ApiError 503 otherwise."""
        phase, reason = self.status
        model = self.require_model()
        if phase is not Phase.READY:
            raise unavailable(_describe(phase, reason))
        return model


def _describe(phase: Phase, reason: str) -> str:
    said = {
        Phase.LOADING: "the model is still loading; try again soon",
        Phase.DRAINING: "the server is shutting down and takes no new requests",
        Phase.DEAD: "the engine has died",
        Phase.READY: "ready",
    }[phase]
    return f"{said}: {reason}" if reason else said
