"""Chooses the AllReduces before loading, from the options, the cost model and measurements on this host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.make import parse_all_reduce
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.group.host import num_cores
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.accuracy import Accuracy, read_accuracy
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.rules import Policy, check_shape, describe_layers, read_policy_file
from tightwire.comm.policy.tune_file import Measured, read_tuned, this_host, tune_path
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import make_layout
from tightwire.server.config.parallel import POLICY_PREFIX, ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.ipc.messages import CommChoice
from tightwire.server.plan.setting import DecidedSetting, decide_setting
from tightwire.sizes import format_bytes
from tightwire.whole_folder import cache_folder


@dataclass(frozen=True, slots=True)
class CommDecision:
    """The chosen AllReduces by policy name, the server's own first, and the measurements behind them."""

    choosers: dict[str, Chooser]
    setting: Setting
    measured: Measured | None  # the results of ``tightwire tune`` for this setting
    warning: str | None  # why its files were not used

    @property
    def chooser(self) -> Chooser:
        """The chooser of the server's own policy."""
        return next(iter(self.choosers.values()))

    @property
    def feedback_elem_bytes(self) -> int:
        """Bytes of carried rounding errors for each number of a step's messages, at most, over policies and phases."""
        legs: dict[tuple[str, str], set[tuple[int, int]]] = {}
        for name, chooser in self.choosers.items():
            for rule in chooser.policy().rules:
                for choice in rule.choices:
                    for leg, codec in enumerate(parse_all_reduce(choice.algorithms[0]).codecs):
                        if codec.feedback:
                            legs.setdefault((name, rule.phase), set()).add((leg, codec.rotated_elems))
        return Feedback.elem_bytes * max(map(len, legs.values()), default=0)

    def notes(self) -> list[str]:
        """Log lines: warnings, then each choice for the layers with its reason."""
        warnings = [self.warning, *(chooser.warning for chooser in self.choosers.values())]
        notes = [f"warning: {warning}" for warning in warnings if warning is not None]
        for name, chooser in self.choosers.items():
            prefix = "" if chooser is self.chooser else f"on request, {name}: "
            notes += [f"{prefix}allreduce {line}" for line in describe_choices(policy_choices(chooser.policy()))]
        return notes


def describe_request(options: ParallelOptions) -> str:
    """The requested name and its qualifiers in one word, such as ``flash-int8+decode=two-shot``."""
    qualifiers = {"decode": options.allreduce_decode, "error-budget": options.comm_error_budget}
    given = [f"{name}={value}" for name, value in qualifiers.items() if value is not None]
    return "+".join([options.allreduce, *given])


def policy_requests(config: ServeConfig, model: LlamaConfig) -> dict[str, PolicyRequest]:
    """The policy requests by name, the server's own first. ValueError: an impossible split, or another model's policy file."""
    parallel, engine = config.parallel, config.engine
    make_layout(model, parallel.num_summing, parallel.tp_split and parallel.tp_split[: parallel.num_summing])
    base = PolicyRequest(
        row_elems=model.hidden_size,
        max_rows=engine.max_num_batched_tokens,
        max_decode_rows=engine.max_num_seqs,
        num_layers=model.num_layers,
        decode=parallel.allreduce_decode,
        budget=parallel.comm_error_budget,
        accuracy=Accuracy(command=f"tightwire tune --quality {config.model.model} --tp {parallel.num_summing}"),
    )
    own, extra = parallel.allreduce, replace(base, flag="--allreduce-extra")
    asked = {own: base} | {name: extra for name in parallel.allreduce_extra if name != own}
    return {name: _request(request, name, model) for name, request in asked.items()}


def _request(base: PolicyRequest, name: str, model: LlamaConfig) -> PolicyRequest:
    if not name.startswith(POLICY_PREFIX):
        return replace(base, allreduce=name)
    path = Path(name.removeprefix(POLICY_PREFIX))
    file = read_policy_file(path)
    check_shape(file, path.name, {"num_layers": model.num_layers, "hidden_size": model.hidden_size})
    return replace(base, file=file, file_name=path.name)


def decide_comm(
    requests: Mapping[str, PolicyRequest],
    setting: Setting,
    devices: Sequence[str],
    link: LinkFacts | None = None,
    model_id: str = "",
) -> CommDecision:
    """Build one chooser per policy from this host's tune results. ValueError: an unknown AllReduce.

    ``link``: the wire between nodes; transfers are predicted from its rate, and only compute times are measured ones.
    ``model_id``: the fingerprint of the model, to find what quantized sums cost it.
    """
    host = this_host(devices, num_cores())
    records = read_tuned(tune_path(cache_folder(), host), host)
    measured = records.of(setting)
    costs = CostModel(setting, measured and measured.rows(), link and link.link, records.computing_of(setting))
    wrong, default = measured and measured.wrong, next(iter(requests.values())).accuracy
    accuracy, damage = read_accuracy(cache_folder(), model_id, setting.world_size, default)
    choosers = {name: Chooser(replace(request, accuracy=accuracy), costs, wrong) for name, request in requests.items()}
    return CommDecision(choosers, setting, measured, "; ".join(filter(None, (records.warning, damage))) or None)


def policy_choices(policy: Policy) -> list[CommChoice]:
    """The policy as lines of ``CommSetup``."""
    choices: list[CommChoice] = []
    for rule in policy.rules:
        layers = None if rule.layers is None else list(rule.layers)
        for choice in rule.choices:
            line = rule.site, rule.phase, choice.up_to_bytes, choice.algorithms[0], choice.reason, layers
            choices.append(CommChoice(*line))
    return choices


def describe_choices(choices: Sequence[CommChoice]) -> list[str]:
    """One line for each algorithm and reason, for the sums of the layers."""
    by_reason: dict[tuple[str, int | None, str], list[str]] = {}
    for choice in choices:
        if choice.site == "embed":
            continue
        kind = f"{choice.phase} {choice.site}"
        kind += "" if choice.layers is None else f" of {describe_layers(choice.layers)}"
        by_reason.setdefault((choice.algorithm, choice.up_to_bytes, choice.reason), []).append(kind)
    all_kinds = {kind for kinds in by_reason.values() for kind in kinds}
    lines = []
    for (algorithm, up_to_bytes, reason), kinds in by_reason.items():
        size = "" if up_to_bytes is None else f" up to {format_bytes(up_to_bytes)}"
        if up_to_bytes is None and any(limit and others == kinds for (_, limit, _), others in by_reason.items()):
            size = " for larger messages"
        where = "" if len(kinds) == len(all_kinds) else f" for {', '.join(kinds)}"
        lines.append(f"{algorithm}{where}{size}: {reason}")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class SumDecision:
    """The part of a decision that needs no memory: it explains the AllReduces of a model that does not fit here."""

    decided: DecidedSetting
    comm: CommDecision | None  # None: a single rank
    library: CommDecision | None  # if the GPUs cannot reach each other's memory, which only the ranks can test


def decide_sums(
    config: ServeConfig, model: LlamaConfig, link: LinkFacts | None = None, model_id: str = ""
) -> SumDecision:
    """Resolve every ``auto`` about sums; arguments and errors as for ``run_plan.decide``."""
    parallel, decided = config.parallel, decide_setting(config, model, link)
    comm, library = None, None
    if parallel.num_summing > 1:
        requests, devices = policy_requests(config, model), [gpu.name for gpu in decided.gpus]
        comm = decide_comm(requests, decided.setting, devices, None if parallel.sums_inside else link, model_id)
        if decided.setting.transport == "peer-memory" and parallel.transport == "auto":
            other = msgspec.structs.replace(decided.setting, transport="process-group")
            library = decide_comm(requests, other, devices, model_id=model_id)
    return SumDecision(decided=decided, comm=comm, library=library)
