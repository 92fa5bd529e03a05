"""The dependencies of every route: the engine, the loaded model, HTTP options, metrics."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.errors import ApiError, unavailable
from tightwire.server.api.lora import Adapters
from tightwire.server.api.metrics import Metrics
from tightwire.server.api.request_bodies import TightwireOptions
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.engine_client import EngineClient, EngineState, Phase
from tightwire.server.plan.rank_setup import RunPlan, ServedAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Facts about the running model, known once its ranks are ready."""

    name: str  # the name that clients use, and that answers have
    plan: RunPlan
    vocab_size: int  # rows of the embedding; ids at or above it do not exist
    root: str = ""  # the folder or file it came from
    tp: int = 1
    tp_split: tuple[float, ...] | None = None
    weights: str = ""  # their packed formats, such as Q4_1+Q8_0; empty: not packed
    kernels: str = ""  # level of the CPU kernels, such as v4-bf16; empty on a GPU
    other_names: tuple[str, ...] = ()  # that clients may use as well
    sampling: Mapping[str, float] = field(default_factory=dict)  # what a request leaves out; max_new_tokens: its limit
    default_seed: int = 0  # for requests without a seed; 0: a random seed per request
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: Adapters = field(default_factory=Adapters)  # LoRA adapters, which change while the server runs

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.other_names

    def adapter(self, name: str | None) -> ServedAdapter | None:
        """The adapter that a request's ``model`` names; None: the base model. ApiError 404: it names neither."""
        adapter = self.adapters.by_name.get(name or "")
        if adapter is None and name not in (None, *self.names):
            names = ", ".join(map(repr, (*self.names, *self.adapters.by_name)))
            message = f"the model {name[:200]!r} does not exist here; this server has {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return adapter

    def policy(self, asked: TightwireOptions) -> str | None:
        """Return the name of the policy that a request asks for; None: the server's own."""
        own = asked.allreduce or self.plan.policies[0].name
        return f"{own}/tensor" if asked.prefill == "tensor" else asked.allreduce

    def fingerprint(self, policy: str | None = None, adapter: ServedAdapter | None = None) -> str:
        """All that changes the bits of weights, products or sums: equal seeds give equal text only under an equal one.

        ``policy``: the one that a request names, in place of the server's own at the start of ``allreduce``.
        """
        lora = "" if adapter is None else f"lora-{adapter.digest}"
        plan, own = self.plan, self.plan.policies[0].name
        allreduce = (own if policy is None else policy) + plan.allreduce.removeprefix(own)
        activations = "int8-activations" if plan.activations == "int8" else ""
        cache = f"{plan.kv_dtype}-cache" if plan.kv_dtype != plan.dtype else ""
        sums = f"{plan.sum_dtype}-sums" if self.tp > 1 else ""
        stages = f"{'pipeline' if plan.is_pipeline else 'hybrid'}{plan.stages.num_stages}" if plan.stages else ""
        hidden = f"{plan.stage_codec}-hidden-states" if plan.stage_codec != "none" else ""
        split = f"split{':'.join(f'{share:g}' for share in self.tp_split)}-" if self.tp_split else ""
        always = f"tightwire-tp{self.tp}-{split}{allreduce}-{plan.dtype}"
        parts = (always, stages, hidden, cache, sums, self.weights, activations, lora, self.kernels)
        return "-".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer
    tokens: TokenTable


@dataclass(slots=True)
class ModelHolder:
    """Holds the loaded model. The code that starts the ranks fills it before the engine becomes ready."""

    startup_s: float | None = None  # from the process's start to the model's first answer
    model: ServedModel | None = None

    def fill(self, *, info: ModelInfo, tokenizer: Tokenizer) -> None:
        """Raises ValueError if text from this tokenizer cannot be streamed."""
        self.model = ServedModel(info=info, tokenizer=tokenizer, tokens=TokenTable(tokenizer.backend))


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    engine: EngineClient
    holder: ModelHolder
    http: HttpOptions
    metrics: Metrics
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    logged_fields: set[str] = field(default_factory=set)  # unknown fields of requests, each logged once

    @property
    def status(self) -> EngineState:
        """The engine's state; not ready before the tokenizer is."""
        state = self.engine.state
        if state.phase is Phase.READY and self.holder.model is None:
            return EngineState(phase=Phase.LOADING, reason="tokenizer")
        return state

    def require_model(self, *phases: Phase, counted: bool = False) -> ServedModel:
        """The model, if the engine is ready or in one of ``phases``. Raises ApiError 503 otherwise; /metrics has ``counted`` ones."""
        status, model = self.status, self.holder.model
        if model is None or status.phase not in (Phase.READY, *phases):
            if counted:
                self.metrics.requests.labels("refused").inc()
            raise unavailable(str(status))
        return model
