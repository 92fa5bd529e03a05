"""Opens the adapters of ``--lora`` before the ranks start, and decides how many slots the ranks reserve."""

from collections.abc import Sequence
from pathlib import Path

from tightwire.model.adapters.peft import adapter_digest, open_adapter
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.plan.rank_setup import AdapterPlan, ServedAdapter
from tightwire.sizes import format_bytes


def plan_adapters(options: AdapterOptions, model: LlamaConfig) -> AdapterPlan | None:
    """Return the slots and what they hold at start; None: adapters are off. ModelError: an adapter is refused."""
    if not options.num_slots:
        return None
    opened = [(name, open_adapter(Path(folder).expanduser().resolve(), model)) for name, folder in options.named]
    max_rank = options.slot_rank(max((adapter.rank for _, adapter in opened), default=0))
    for name, adapter in opened:
        if adapter.rank > max_rank:
            raise ValueError(
                f"--max-lora-rank {max_rank}: the adapter {name!r} has rank {adapter.rank}; give at least that"
            )
    loaded = tuple(
        ServedAdapter(id=number, name=name, folder=str(adapter.folder), digest=adapter_digest(adapter.folder))
        for number, (name, adapter) in enumerate(opened, start=1)
    )
    return AdapterPlan(num_slots=options.num_slots, max_rank=max_rank, loaded=loaded)


def describe_adapters(plan: AdapterPlan, bytes_per_rank: Sequence[int]) -> str:
    """Describe the slots for the log and for ``explain``. ``bytes_per_rank``: what the slots take."""
    names = ", ".join(adapter.name for adapter in plan.loaded) or "none"
    sizes = " and ".join(dict.fromkeys(map(format_bytes, bytes_per_rank)))
    return (
        f"adapters: {plan.num_slots} slots for rank {plan.max_rank}, {sizes} a rank, loaded: {names}; the ranks' sums carry "
        "no byte more"
    )
