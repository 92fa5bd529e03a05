"""What every router is given: the engine, the model once there is one, the door's options, the metrics."""

from dataclasses import dataclass

from tightwire.server.api.errors import unavailable
from tightwire.server.api.metrics import Metrics
from tightwire.server.api.served_model import ModelSlot, ServedModel
from tightwire.server.config.http import HttpOptions
from tightwire.server.ipc.engine_client import EngineClient, EngineState, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    engine: EngineClient
    slot: ModelSlot
    http: HttpOptions
    metrics: Metrics

    @property
    def status(self) -> EngineState:
        """The engine's; it is not ready before the tokenizer is."""
        state = self.engine.state
        if state.phase is Phase.READY and self.slot.model is None:
            return EngineState(phase=Phase.LOADING, reason="tokenizer")
        return state

    def require_model(self) -> ServedModel:
        """The model, for routes that do not need the engine to take new work.

        Raises:
            ApiError: 503 while it loads, or after the engine died.
        """
        status, model = self.status, self.slot.model
        if model is None or status.phase in (Phase.LOADING, Phase.DEAD):
            raise unavailable(str(status))
        return model

    def require_ready(self) -> ServedModel:
        """The model, when the engine would answer. Raises ApiError 503 otherwise."""
        status, model = self.status, self.require_model()
        if status.phase is not Phase.READY:
            raise unavailable(str(status))
        return model
