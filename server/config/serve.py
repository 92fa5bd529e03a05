"""The one frozen tree of options of ``serve``; flags (``flags``) and YAML keys are derived from its fields.

Each field's metadata carries its help text. A value is checked where it is born; an unknown key is an error.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from tightwire.server.config.engine import EngineOptions
from tightwire.server.config.http import HttpOptions
from tightwire.server.config.model import ModelOptions
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.weights import WeightOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    weights: WeightOptions = field(default_factory=WeightOptions)
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        if self.parallel.link is not None and self.model.device == "cuda":
            raise ValueError("--link is between ranks on the CPU; give --device cpu, or leave --link out")
        if self.parallel.dp > 1 and self.engine.plan_ahead == "on":
            raise ValueError(
                f"--plan-ahead on cannot be had beside --dp {self.parallel.dp}, whose replicas' steps are planned together; "
                "use --plan-ahead auto or off"
            )
        if self.weights.weights == "partition":
            _require_sharers(self.parallel)


def _require_sharers(parallel: ParallelOptions) -> None:
    """Replicas of a node share layers, so there are several on each."""
    if parallel.dp == parallel.nodes or parallel.dp == 1:
        raise ValueError(
            f"--weights partition shares layers among the replicas of a node, and --dp {parallel.dp} --nodes {parallel.nodes} has one on "
            f"each; give --dp {2 * parallel.nodes} or more, or --weights stream"
        )


def option_fields() -> dict[str, tuple[str, Any]]:
    """Every option by name: the group it lives in and its dataclass field. Names are unique over the groups."""
    groups = {
        "model": ModelOptions,
        "parallel": ParallelOptions,
        "engine": EngineOptions,
        "weights": WeightOptions,
        "http": HttpOptions,
    }
    return {f.name: (group, f) for group, cls in groups.items() for f in fields(cls)}
