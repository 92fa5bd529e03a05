"""Wraps a model's forwards: modules have parameters only during a forward.

Blocks go through gates; the embedding, the head and norms outside blocks only receive their weights.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tightwire.training.engine.flat_parameters import Bucket, BucketPlan, Use
from tightwire.training.engine.gates import gate_inputs, gate_outputs, needs_gradient
from tightwire.training.engine.micro_batch import MicroBatch


class Hooks:
    """The wrapped forwards of ``model``. ``micro_batch`` is the current one, or None."""

    def __init__(self, model: nn.Module, plan: BucketPlan) -> None:
        self.micro_batch: MicroBatch | None = None
        self._wrapped: list[nn.Module] = []
        hosted = _uses_by_host(plan)
        for host, uses in hosted.items():
            module = model.get_submodule(host)
            users = [(model.get_submodule(use.module), use) for use in uses]
            bucket = plan.blocks[plan.block_modules.index(host)] if host in plan.block_modules else None
            if bucket is None:
                module.forward = self._plain_forward(module.forward, users)
            else:
                module.forward = self._block_forward(module.forward, users, bucket)
            self._wrapped.append(module)
        for use in plan.uses:
            del model.get_submodule(use.module)._parameters[use.attribute]

    def close(self) -> None:
        """Restore the modules' forwards. Their parameters are not restored."""
        for module in self._wrapped:
            del module.forward
        self._wrapped.clear()

    def _plain_forward(self, forward: Callable[..., Any], users: "list[_User]") -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            micro_batch = self._current()
            weights = [micro_batch.parameter(use, micro_batch.anchor) for _, use in users]
            with _given(users, weights):
                return forward(*args, **kwargs)

        return run

    def _block_forward(self, forward: Callable[..., Any], users: "list[_User]", bucket: Bucket) -> Callable[..., Any]:
        trainable = any(use.flat_param.trainable for _, use in users)

        def run(*args: Any, **kwargs: Any) -> Any:
            micro_batch = self._current()
            every = micro_batch.options.checkpoint_every
            anchor = micro_batch.anchor
            micro_batch.begin_block(bucket)
            awaits_backward = torch.is_grad_enabled() and (trainable or needs_gradient((args, kwargs)))
            if awaits_backward:
                anchor, (args, kwargs) = gate_inputs(partial(micro_batch.backward_ends, bucket), anchor, (args, kwargs))
            weights = [micro_batch.parameter(use, anchor) for _, use in users]

            def compute() -> Any:
                with _given(users, weights):
                    return forward(*args, **kwargs)

            if awaits_backward and every and bucket.block is not None and bucket.block % every == 0:
                outputs = checkpoint(compute, use_reentrant=False)
            else:
                outputs = compute()
            if awaits_backward:
                outputs = gate_outputs(partial(micro_batch.backward_begins, bucket), outputs)
            micro_batch.end_block(bucket, awaits_backward)
            return outputs

        return run

    def _current(self) -> MicroBatch:
        if self.micro_batch is None:
            raise RuntimeError(
                "the model has no parameters here; run it inside engine.micro_batch() or engine.evaluation()"
            )
        return self.micro_batch


_User = tuple[nn.Module, Use]


@contextmanager
def _given(users: Iterable[_User], weights: Iterable[Tensor]) -> Iterator[None]:
    """Set the parameters as plain attributes of their modules while the context is open."""
    for (module, use), tensor in zip(users, weights, strict=True):
        module.__dict__[use.attribute] = tensor
    try:
        yield
    finally:
        for module, use in users:
            module.__dict__.pop(use.attribute, None)


def _uses_by_host(plan: BucketPlan) -> dict[str, list[Use]]:
    """Uses by host, the module whose forward sets them: the enclosing block, else the user. All blocks are hosts."""
    hosted: dict[str, list[Use]] = {block: [] for block in plan.block_modules}
    for use in plan.uses:
        host = next((block for block in plan.block_modules if f"{use.module}.".startswith(f"{block}.")), use.module)
        hosted.setdefault(host, []).append(use)
    return hosted
