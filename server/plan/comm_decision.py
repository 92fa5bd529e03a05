"""Chooses the AllReduce algorithms before loading: of the server, and those that a request may name.

A name is a value of ``--allreduce``, or ``policy:FILE``. ``--comm-policy FILE`` is the same as ``policy:FILE``. The
choice follows from the options, the cost model and measurements on this host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.policy_file import check_shape, read_policy_file
from tightwire.comm.policy.rules import describe_layers
from tightwire.comm.policy.tune_file import Measured, read_tuned, this_host, tune_path
from tightwire.model.checkpoint.catalog import cache_folder
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.server.config.parallel import POLICY_PREFIX, ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.devices import num_cores


@dataclass(frozen=True, slots=True)
class CommDecision:
    """The chosen AllReduces, and the measurements behind them.

    Attributes:
        choosers: by policy name, the server's own first.
        measured: the results of ``tightwire tune`` for this setting, if any.
        warning: the reason a tune file was not used.
    """

    choosers: dict[str, Chooser]
    setting: Setting
    measured: Measured | None
    warning: str | None

    @property
    def chooser(self) -> Chooser:
        """Of the server's own policy."""
        return next(iter(self.choosers.values()))

    def notes(self) -> list[str]:
        """Log lines: warnings, then each choice for the layers with its reason."""
        warnings = [self.warning, *(chooser.warning for chooser in self.choosers.values())]
        notes = [f"warning: {warning}" for warning in warnings if warning is not None]
        for name, chooser in self.choosers.items():
            prefix = "" if chooser is self.chooser else f"on request, {name}: "
            notes += [f"{prefix}allreduce {line}" for line in _choices(chooser)]
        return notes


def own_policy_name(options: ParallelOptions) -> str:
    """The name of the server's own AllReduce; a request may ask for it too."""
    return options.allreduce if options.comm_policy is None else POLICY_PREFIX + options.comm_policy


def describe_request(options: ParallelOptions) -> str:
    """The requested name and its qualifiers in one word, such as ``flash-int8+decode=two-shot``."""
    qualifiers = {"decode": options.allreduce_decode, "error-budget": options.comm_error_budget}
    given = [f"{name}={value}" for name, value in qualifiers.items() if value is not None]
    return "+".join([own_policy_name(options), *given])


def check_all_reduce_names(options: ParallelOptions) -> None:
    """Refuse unknown AllReduce names and unreadable policy files before the model is fetched.

    Raises:
        ValueError: names the flag and the possible values.
    """
    fields = ("allreduce", "allreduce_decode")
    named = [(field, name) for field in fields if (name := getattr(options, field)) is not None]
    named += [("allreduce_extra", name) for name in options.allreduce_extra]
    if options.comm_policy is not None:
        named.append(("comm_policy", own_policy_name(options)))
    for field, name in named:
        try:
            if name.startswith(POLICY_PREFIX) and field in ("allreduce_extra", "comm_policy"):
                read_policy_file(Path(name.removeprefix(POLICY_PREFIX)))
            else:
                parse_all_reduce(name)
        except ValueError as error:
            raise ValueError(f"--{field.replace('_', '-')}: {error}") from None


def policy_requests(config: ServeConfig, model: LlamaConfig) -> dict[str, PolicyRequest]:
    """The policy requests by name, the server's own first, with the message sizes of this model.

    Raises:
        ValueError: a policy file cannot be read, or was made for another model.
    """
    parallel, engine = config.parallel, config.engine
    base = PolicyRequest(
        row_elems=model.hidden_size,
        max_rows=engine.max_num_batched_tokens,
        max_decode_rows=engine.max_num_seqs,
        decode=parallel.allreduce_decode,
        error_budget=parallel.comm_error_budget,
    )
    names = dict.fromkeys([own_policy_name(parallel), *parallel.allreduce_extra])
    return {name: _request(base, name, model) for name in names}


def _request(base: PolicyRequest, name: str, model: LlamaConfig) -> PolicyRequest:
    if not name.startswith(POLICY_PREFIX):
        return replace(base, allreduce=name)
    path = Path(name.removeprefix(POLICY_PREFIX))
    file = read_policy_file(path)
    check_shape(file, path.name, {"num_layers": model.num_layers, "hidden_size": model.hidden_size})
    return replace(base, file=file, file_name=path.name)


def decide_comm(
    requests: Mapping[str, PolicyRequest], setting: Setting, devices: Sequence[str], link: LinkFacts | None = None
) -> CommDecision:
    """Read this host's tune results and build one chooser per policy.

    Args:
        requests: by policy name, the server's own first.
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
    choosers = {name: Chooser(request, costs, wrong) for name, request in requests.items()}
    return CommDecision(choosers, setting, measured, records.warning)


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
