"""Turns options into policy requests: the server's own AllReduce, and those that a request may name.

A name is a value of ``--allreduce``, or ``policy:FILE``. ``--comm-policy FILE`` is the same as ``policy:FILE``.
"""

from dataclasses import replace
from pathlib import Path

from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.policy.choose import PolicyRequest
from tightwire.comm.policy.policy_file import check_shape, read_policy_file
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.server.config.parallel import POLICY_PREFIX, ParallelOptions
from tightwire.server.config.serve import ServeConfig


def own_arm(options: ParallelOptions) -> str:
    """The name of the server's own AllReduce; a request may ask for it too."""
    return options.allreduce if options.comm_policy is None else POLICY_PREFIX + options.comm_policy


def describe_request(options: ParallelOptions) -> str:
    """The requested name and its qualifiers in one word, such as ``flash-int8+decode=two-shot``."""
    beside = {
        "decode": options.allreduce_decode,
        "error-budget": options.comm_error_budget,
    }
    return "+".join([own_arm(options), *(f"{name}={value}" for name, value in beside.items() if value is not None)])


def check_all_reduce_names(options: ParallelOptions) -> None:
    """Refuse unknown AllReduce names and unreadable policy files before the model is fetched.

    Raises:
        ValueError: names the flag and the possible values.
    """
    fields = ("allreduce", "allreduce_decode")
    named = [(field, name) for field in fields if (name := getattr(options, field)) is not None]
    named += [("allreduce_extra", name) for name in options.allreduce_extra]
    if options.comm_policy is not None:
        named.append(("comm_policy", own_arm(options)))
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
    names = dict.fromkeys([own_arm(parallel), *parallel.allreduce_extra])
    return {name: _request(base, name, model) for name in names}


def policy_request(config: ServeConfig, model: LlamaConfig) -> PolicyRequest:
    """The server's own policy request."""
    return next(iter(policy_requests(config, model).values()))


def _request(base: PolicyRequest, name: str, model: LlamaConfig) -> PolicyRequest:
    if not name.startswith(POLICY_PREFIX):
        return replace(base, allreduce=name)
    path = Path(name.removeprefix(POLICY_PREFIX))
    file = read_policy_file(path)
    check_shape(file, path.name, {"num_layers": model.num_layers, "hidden_size": model.hidden_size})
    return replace(base, file=file, file_name=path.name)
