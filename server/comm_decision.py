"""How ranks will sum, decided before they load: the options, the cost model, and what was measured on this host."""

from collections.abc import Sequence
from dataclasses import dataclass

from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel, Setting
from tightwire.comm.policy.tune_file import Measured, read_tuned, this_host, tune_path
from tightwire.model.catalog import cache_folder
from tightwire.server.devices import num_cores


@dataclass(frozen=True, slots=True)
class CommDecision:
    """``measured``: what ``tightwire tune`` left for this setting, if anything; ``warning``: why a file was not used."""

    chooser: Chooser
    setting: Setting
    measured: Measured | None
    warning: str | None

    def notes(self) -> list[str]:
        """For the log: whatever is wrong with the host's file, then each choice for the layers with its reason."""
        notes = [] if self.warning is None else [f"warning: {self.warning}"]
        by_reason: dict[tuple[str, int | None, str], list[str]] = {}
        for rule in self.chooser.policy().rules:
            if rule.site == "embed":
                continue
            for choice in rule.choices:
                key = (choice.algorithms[0], choice.up_to_bytes, choice.reason)
                by_reason.setdefault(key, []).append(f"{rule.phase} {rule.site}")
        for (algorithm, up_to_bytes, reason), kinds in by_reason.items():
            size = "" if up_to_bytes is None else f" up to {up_to_bytes} B"
            where = "" if len(kinds) == _NUM_KINDS else f" for {', '.join(kinds)}"
            notes.append(f"allreduce {algorithm}{where}{size}: {reason}")
        return notes


_NUM_KINDS = 4  # two sites in two phases


def decide_comm(request: PolicyRequest, setting: Setting, devices: Sequence[str]) -> CommDecision:
    """Read what was measured on this host, with its CUDA ``devices``, and make what chooses.

    Raises:
        ValueError: a name that no AllReduce has.
    """
    host = this_host(devices, num_cores())
    records = read_tuned(tune_path(cache_folder(), host), host)
    measured = records.of(setting)
    costs = CostModel(setting, None if measured is None else measured.rows())
    chooser = Chooser(request, costs, None if measured is None else measured.wrong)
    return CommDecision(chooser, setting, measured, records.warning)
