"""Chooses the AllReduce algorithms before loading, from the options, the cost model and measurements on this host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.rules import describe_layers
from tightwire.comm.policy.tune_file import Measured, read_tuned, this_host, tune_path
from tightwire.model.checkpoint.catalog import cache_folder
from tightwire.server.plan.devices import num_cores


@dataclass(frozen=True, slots=True)
class CommDecision:
    """The chosen AllReduces, and the measurements behind them.

    Attributes:
        measured: the results of ``tightwire tune`` for this setting, if any.
        warning: the reason a tune file was not used.
        extra: by name, the choosers of the policies that requests may ask for.
    """

    chooser: Chooser
    setting: Setting
    measured: Measured | None
    warning: str | None
    extra: dict[str, Chooser] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Log lines: warnings, then each choice for the layers with its reason."""
        warnings = [self.warning, *(chooser.warning for chooser in (self.chooser, *self.extra.values()))]
        notes = [f"warning: {warning}" for warning in warnings if warning is not None]
        notes += [f"allreduce {line}" for line in _choices(self.chooser)]
        for name, chooser in self.extra.items():
            notes += [f"on request, {name}: allreduce {line}" for line in _choices(chooser)]
        return notes


def _choices(chooser: Chooser) -> list[str]:
    by_reason: dict[tuple[str, int | None, str], list[str]] = {}
    layers = [rule for rule in chooser.policy().rules if rule.site != "embed"]
    for rule in layers:
        kind = f"{rule.phase} {rule.site}" + ("" if rule.layers is None else f" of {describe_layers(rule.layers)}")
        for choice in rule.choices:
            key = (choice.algorithms[0], choice.up_to_bytes, choice.reason)
            by_reason.setdefault(key, []).append(kind)
    lines = []
    for (algorithm, up_to_bytes, reason), kinds in by_reason.items():
        size = "" if up_to_bytes is None else f" up to {up_to_bytes} B"
        where = "" if len(kinds) == len(layers) else f" for {', '.join(kinds)}"
        lines.append(f"{algorithm}{where}{size}: {reason}")
    return lines


def decide_comm(
    requests: Mapping[str, PolicyRequest], setting: Setting, devices: Sequence[str], link: LinkFacts | None = None
) -> CommDecision:
    """Read this host's tune results and build one chooser per policy.

    Args:
        requests: by name; the server's own comes first.
        devices: names of the CUDA devices.
        link: the wire between the nodes. Of results measured without it, only the compute times are used; transfers are
            predicted from the link's rate.
    Raises:
        ValueError: no AllReduce has the requested name.
    """
    host = this_host(devices, num_cores())
    records = read_tuned(tune_path(cache_folder(), host), host)
    measured = records.of(setting)
    costs = CostModel(
        setting,
        None if measured is None else measured.rows(),
        None if link is None else link.link,
        records.computing_of(setting),
    )
    wrong = None if measured is None else measured.wrong
    own, *extra = ((name, Chooser(request, costs, wrong)) for name, request in requests.items())
    return CommDecision(own[1], setting, measured, records.warning, dict(extra))
