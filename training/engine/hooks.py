"""Runs a model's forwards with the engine's weights: modules have parameters only during a forward.

Blocks go through gates; the embedding, the head and norms outside blocks only receive their weights.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tightwire.training.engine.autograd import (
    gate_tensors,
    is_gated,
    keep_gate_and_up,
    keep_norms_input,
    needs_gradient,
    weight,
    write_gradients,
)
from tightwire.training.engine.flat_parameters import NORMS, Bucket, BucketPlan, ParamSpan, Use
from tightwire.training.engine.gathered_weights import Weights, shares_weight_buffer
from tightwire.training.engine.gradients import Gradients
from tightwire.training.engine.options import EngineOptions


class MicroBatch:
    """Requests and releases weights and collects gradients in one forward and backward; an evaluation has no backward.

    Forward calls blocks in order, backward in reverse. The last ``num_buffers`` blocks keep their weights from forward to
    backward, the first ones from backward to the next micro-batch. In passes that prefetch, the next ``num_buffers`` blocks
    are requested before computing one.
    """

    def __init__(
        self,
        plan: BucketPlan,
        options: EngineOptions,
        weights: Weights,
        gradients: Gradients,
        anchor: Tensor,
        *,
        last: bool,
    ) -> None:
        """``last``: it is the last micro-batch of the optimizer step."""
        self.options, self.anchor, self.block_anchor = options, anchor, anchor
        self._plan, self._weights, self._gradients, self._last = plan, weights, gradients, last
        self._blocks = plan.blocks
        self._ahead, self._ahead_back = options.ahead("forward"), options.ahead("backward")
        self._in_use: list[Bucket] = []  # buckets without gates, from their first use on
        self._made: dict[ParamSpan, Tensor] = {}  # parameters of buckets without gates, shared by tied modules
        # By bucket without gates: parameters that await gradients.
        self._missing_gradients: dict[int, set[ParamSpan]] = {}
        self._awaiting: set[int] = set()  # blocks whose backward has not ended
        self._next_block = 0  # whose forward comes next
        self._ends = [
            bucket for bucket in plan.buckets if bucket.block is None and shares_weight_buffer(options, bucket)
        ]
        if self._ahead:
            for bucket in plan.buckets:
                if bucket.block is None and bucket not in self._ends[1:]:
                    weights.request(bucket)
            self._request(range(options.num_buffers))

    def begin_block(self, bucket: Bucket, block: int) -> None:
        """Before the first block of ``bucket``, wait for its weights, and request those of the next buckets."""
        assert bucket.block is not None
        if bucket.block in self._awaiting:
            raise RuntimeError(f"blocks.{block} was called twice in a micro-batch; each block is called once")
        if block != self._next_block:
            raise RuntimeError(
                f"blocks.{block} was called before blocks.{self._next_block}: weights are gathered in the order of the model's "
                "blocks, so a forward calls all of them in that order"
            )
        self._next_block = (self._next_block + 1) % len(self._plan.block_modules)
        if block == 0:
            self._release_ends()  # the embedding: its backward does not read the weights
        if block % self._plan.per_bucket:
            return
        self._weights.request(bucket)
        self._request(range(bucket.block + 1, bucket.block + 1 + self._ahead))
        self._weights.use(bucket)

    def end_block(self, bucket: Bucket, awaits_backward: bool) -> None:
        assert bucket.block is not None
        if awaits_backward:
            self._awaiting.add(bucket.block)
        is_among_last = bucket.block >= len(self._blocks) - self.options.num_buffers
        self._weights.done(bucket, keep=awaits_backward and is_among_last)

    def parameter(self, use: Use, anchor: Tensor) -> Tensor:
        """The tensor that a module computes with. ``anchor``: the gated one of its block, or ``self.anchor``."""
        bucket, flat_param, param = use.bucket, use.flat_param, use.param
        if bucket.block is None and bucket not in self._in_use:
            if bucket in self._ends:
                self._release_ends()
            self._weights.use(bucket)
            self._in_use.append(bucket)
        values = self._weights.view(bucket, flat_param, param)
        if not flat_param.trainable or not torch.is_grad_enabled():
            return values
        if bucket.block is not None:
            view = partial(self._gradients.view, bucket, param)
            return weight(anchor, values, partial(self._gradients.add, bucket, param), view)
        if param not in self._made:
            self._missing_gradients.setdefault(bucket.number, set()).add(param)
            view = partial(self._begun_view, bucket, param)
            self._made[param] = weight(anchor, values, partial(self._take, bucket, param), view)
        return self._made[param]

    def backward_begins(self, bucket: Bucket) -> None:
        assert bucket.block is not None
        self._weights.request(bucket)
        before = range(bucket.block - 1, bucket.block - 1 - self._ahead_back, -1)
        self._request(block for block in before if block in self._awaiting)
        self._weights.use(bucket)
        if bucket.trainable is not None:
            self._gradients.begin(bucket)

    def backward_ends(self, bucket: Bucket) -> None:
        """Called when all gradients of the block are in its buffer, before backward continues to the inputs."""
        assert bucket.block is not None
        self._awaiting.remove(bucket.block)
        self._weights.done(bucket, keep=not self._last and bucket.block < self.options.num_buffers)
        if bucket.trainable is not None:
            self._gradients.end(bucket, self._last)

    def release_weights(self) -> None:
        """Release the weights after forward and backward."""
        self._release_ends()
        for bucket in self._in_use:
            self._weights.done(bucket, keep=True)
        if self._last or self._awaiting:
            self._weights.drop_shared()
        self._made.clear()
        self.block_anchor = self.anchor  # its graph holds this object, in a circle that Python cannot see

    def _release_ends(self) -> None:
        for bucket in filter(self._in_use.__contains__, self._ends):
            self._weights.done(bucket, keep=False)
            self._in_use.remove(bucket)

    def _request(self, blocks: Iterable[int]) -> None:
        """Have blocks gathered; the number behind the last one is the head's, if it shares a buffer."""
        in_order = [*self._blocks, *self._ends[1:]]
        for block in blocks:
            if 0 <= block < len(in_order):
                self._weights.request(in_order[block])

    def _begun_view(self, bucket: Bucket, param: ParamSpan, dtype: torch.dtype) -> Tensor | None:
        self._gradients.begin(bucket)
        return self._gradients.view(bucket, param, dtype)

    def _take(self, bucket: Bucket, param: ParamSpan, grad: Tensor | None) -> None:
        """Take a gradient of a bucket without gates. The bucket is complete when all used parameters have theirs."""
        self._gradients.begin(bucket)
        self._gradients.add(bucket, param, grad)
        missing = self._missing_gradients[bucket.number]
        missing.discard(param)
        if not missing:
            self._gradients.end(bucket, self._last)


class Hooks:
    """The wrapped forwards of ``model``. ``micro_batch`` is the current one, or None."""

    def __init__(self, model: nn.Module, plan: BucketPlan) -> None:
        self.micro_batch: MicroBatch | None = None
        self._wrapped: set[nn.Module] = set()
        for use in plan.uses:
            layer = model.get_submodule(use.module)
            if use.flat_param.trainable and use.attribute == "weight" and type(layer) is nn.Linear:
                write_gradients(layer)
            elif [*layer._parameters] == ["weight"] and use.bucket.name == NORMS:
                keep_norms_input(layer)
            else:
                continue
            self._wrapped.add(layer)
        for module in filter(is_gated, model.modules()):
            keep_gate_and_up(module)
            self._wrapped.add(module)
        hosted = _uses_by_host(plan)
        for host, uses in hosted.items():
            module = model.get_submodule(host)
            users = [(model.get_submodule(use.module), use) for use in uses]
            if host in plan.block_modules:
                module.forward = self._block_forward(module.forward, users, plan, hosted, host)
            else:
                module.forward = self._plain_forward(module.forward, users)
            self._wrapped.add(module)
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

    def _block_forward(
        self, forward: Callable[..., Any], users: "list[_User]", plan: BucketPlan, hosted: "_Hosted", host: str
    ) -> Callable[..., Any]:
        block, size = plan.block_modules.index(host), plan.per_bucket
        bucket, group = plan.blocks[block // size], plan.block_modules[block - block % size :][:size]
        begins, ends = host == group[0], host == group[-1]
        trainable = any(use.flat_param.trainable for name in group for use in hosted[name])

        def run(*args: Any, **kwargs: Any) -> Any:
            micro_batch = self._current()
            awaits_backward = torch.is_grad_enabled() and (trainable or needs_gradient((args, kwargs)))
            micro_batch.begin_block(bucket, block)
            if begins:
                anchor = micro_batch.anchor
                if awaits_backward:
                    event = partial(micro_batch.backward_ends, bucket)
                    anchor, (args, kwargs) = gate_tensors(event, (anchor, (args, kwargs)))
                micro_batch.block_anchor = anchor
            weights = [micro_batch.parameter(use, micro_batch.block_anchor) for _, use in users]

            def compute(_: Tensor) -> Any:
                with _given(users, weights):
                    return forward(*args, **kwargs)

            if awaits_backward and block < micro_batch.options.checkpoint_blocks:
                # It keeps the state of the random numbers of its tensors' device, so that dropout has the same mask again.
                outputs = checkpoint(compute, micro_batch.block_anchor, use_reentrant=False)
            else:
                outputs = compute(micro_batch.block_anchor)
            if ends:
                begin = partial(micro_batch.backward_begins, bucket)
                outputs = gate_tensors(begin, outputs) if awaits_backward else outputs
                micro_batch.end_block(bucket, awaits_backward)
            return outputs

        return run

    def _current(self) -> MicroBatch:
        if self.micro_batch is None:
            raise RuntimeError("the model has no parameters; run it inside engine.micro_batch() or engine.evaluation()")
        return self.micro_batch


_User = tuple[nn.Module, Use]
_Hosted = dict[str, list[Use]]


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


def _uses_by_host(plan: BucketPlan) -> _Hosted:
    """Uses by host, the module whose forward sets them: the enclosing block, else the user. All blocks are hosts."""
    hosted: _Hosted = {block: [] for block in plan.block_modules}
    for use in plan.uses:
        host = next((block for block in plan.block_modules if f"{use.module}.".startswith(f"{block}.")), use.module)
        hosted.setdefault(host, []).append(use)
    return hosted
