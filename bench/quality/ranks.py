"""Runs a tensor-parallel model whose ranks are threads of this process, so any number of ranks is possible.

Layers, shards, kernels and AllReduces are those of the server: sums have the same order and dtype.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self, TypeVar

import torch
from torch import Tensor

from tightwire.bench.quality.compared import make_any
from tightwire.bench.quality.setting import PLAIN_WEIGHTS, Arm, Setting
from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.kernels.layer_ops import rms_norm
from tightwire.kernels.packed import dequantize
from tightwire.model.cache.kv_cache import KVCache
from tightwire.model.decoder import Llama
from tightwire.model.layer_kernels import norm_form
from tightwire.model.open import Checkpoint
from tightwire.model.parallel import TensorParallel
from tightwire.model.step import Batch
from tightwire.model.weights import EVERYTHING_RESIDENT, LEAST_STREAMED, WeightPlan
from tightwire.model.weights.formats import WeightFormats, split_model
from tightwire.model.weights.load import CheckpointStore, load_weights
from tightwire.model.weights.source import WeightSource

_Result = TypeVar("_Result")
MakeRoutes = Callable[[Sequence[Arm], Group], Routes]
_BLOCK_SIZE = 16
_TIMEOUT_S = 600.0


def plain_routes(arms: Sequence[Arm], group: Group) -> Routes:
    """Make the arms' routes in order, as ``serve`` does."""
    policies = [(arm.name, arm.policy) for arm in arms]
    return Routes(policies, make_candidates([policy for _, policy in policies], group, make_any))


def ranks_of(setting: Setting, world_size: int) -> "ThreadRanks":
    """The ranks that measure ``setting``, to be closed."""
    return ThreadRanks(
        setting.checkpoint,
        world_size,
        dtype=setting.dtype,
        formats=setting.formats,
        num_sequences=setting.options.batch,
        max_tokens=setting.options.window,
    )


class ThreadRanks:
    """Runs ``world_size`` ranks of ``checkpoint``. Call ``set_arms`` before the first pass."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        world_size: int,
        *,
        dtype: torch.dtype,
        num_sequences: int,
        max_tokens: int,
        formats: WeightFormats | None = None,
    ) -> None:
        """Allocate a cache for ``num_sequences`` of up to ``max_tokens`` each; without ``formats`` all matrices are plain."""
        self.world_size, self.num_layers = world_size, checkpoint.config.num_layers
        self._checkpoint, self._config, self._max_tokens = checkpoint, checkpoint.config, max_tokens
        self._dtype, self._device, self._formats = dtype, torch.device("cpu"), formats or WeightFormats()
        self._layout = split_model(checkpoint.config, self._formats, world_size)
        self._groups = in_process_groups(world_size, timeout_s=_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(world_size, "rank", initializer=torch.set_num_threads, initargs=(1,))
        self._stack = ExitStack()
        self._stack.callback(self._pool.shutdown)
        for group in self._groups:
            self._stack.callback(group.close)
        self._caches: dict[torch.dtype | None, list[KVCache]] = {}  # by ``Arm.kv_dtype``, in rank order
        self._num_blocks = num_sequences * -(-max_tokens // _BLOCK_SIZE)
        self._weights: dict[tuple[str, bool], list[WeightSource]] = {}  # by ``Arm.weights``, in rank order
        outers = [weights.outer for weights in self._weights_of(PLAIN_WEIGHTS)]
        self._final_norm_D = outers[0].final_norm
        self.head_VD = torch.cat([dequantize(outer.head, torch.float32) for outer in outers])
        self._models: list[list[Llama]] = []  # by arm, in rank order

    def set_arms(self, arms: Sequence[Arm], make_routes: MakeRoutes = plain_routes) -> None:
        """Set the arms, which passes select by index; ValueError if a codec cannot encode the weights."""
        kinds = [(arm.weights, arm.sum_dtype(self._dtype), arm.kv_dtype) for arm in arms]
        made = {kind: self._make_models(arms, *kind, make_routes) for kind in set(kinds)}
        self._models = [made[kind] for kind in kinds]

    def _make_models(
        self,
        arms: Sequence[Arm],
        kind: tuple[str, bool],
        sum_dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        make_routes: MakeRoutes,
    ) -> list[Llama]:
        weights = self._weights_of(kind)
        if kv_dtype not in self._caches:
            sizes = {"num_blocks": self._num_blocks, "block_size": _BLOCK_SIZE, "dtype": self._dtype}
            made = [
                KVCache(self._config, each, **sizes, kv_dtype=kv_dtype, device=self._device)
                for each in self._layout.shards
            ]
            self._caches[kv_dtype] = made
        caches = self._caches[kv_dtype]
        return self._on_ranks(
            lambda rank: Llama(
                self._config,
                TensorParallel(self._groups[rank], self._layout, make_routes(arms, self._groups[rank]), sum_dtype),
                weights[rank],
                caches[rank],
                self._max_tokens,
            )
        )

    def _weights_of(self, kind: tuple[str, bool]) -> list[WeightSource]:
        """Each rank's weights of an ``Arm.weights``: resident without a codec, otherwise streamed through it."""
        if kind not in self._weights:
            self._weights[kind] = self._on_ranks(lambda rank: self._load(*kind, rank))
            for weights in self._weights[kind]:
                self._stack.callback(weights.close)
        return self._weights[kind]

    def _load(self, codec: str, int8_activations: bool, rank: int) -> WeightSource:
        plan = EVERYTHING_RESIDENT
        formats = self._formats.with_int8_activations() if int8_activations else self._formats
        if codec != "none":
            if self.num_layers < LEAST_STREAMED:
                raise ValueError(
                    f"weights:{codec}: the model has {self.num_layers} layers, but streaming needs at least {LEAST_STREAMED}"
                )
            plan = WeightPlan(source="stream", origin="host", codec=codec, streamed=tuple(range(self.num_layers)))
        reader, shard = self._checkpoint.reader(), self._layout.shards[rank]
        files = CheckpointStore.for_plan(reader, self._config, shard, plan, self._dtype, formats)
        return load_weights(files, plan, device=self._device, timeout_s=_TIMEOUT_S)

    def forward(self, token_ids_BL: Tensor, arm: int, num_decode: int = 0) -> Tensor:
        """``prefill``, but the last ``num_decode`` tokens are decode rows, computed one at a time."""
        start = token_ids_BL.shape[1] - num_decode
        parts = [self.prefill(token_ids_BL[:, :start], arm, num_tokens=token_ids_BL.shape[1])]
        for place in range(start, token_ids_BL.shape[1]):
            parts.append(self.prefill(token_ids_BL[:, : place + 1], arm, first=place, num_tokens=token_ids_BL.shape[1]))
        return torch.cat(parts, 1)

    def prefill(self, token_ids_BL: Tensor, arm: int, *, first: int = 0, num_tokens: int = 0) -> Tensor:
        """Run B prompts of L tokens; return (B, L, D) hidden states after the final norm.

        B may exceed the constructor's ``num_sequences`` if all tokens fit into the cache. ``first``: the place of the only token to
        compute, as a generated one, after others. ``num_tokens``: those that each sequence has room for, by default L.
        """
        num_sequences, context = token_ids_BL.shape
        token_ids_BL = token_ids_BL[:, first:]
        length = context - first
        blocks_each = -(-max(context, num_tokens) // _BLOCK_SIZE)
        positions_BL = torch.arange(first, context).expand(num_sequences, -1)
        tables_BM = torch.arange(num_sequences * blocks_each).view(num_sequences, -1)
        blocks_BL = tables_BM.gather(1, positions_BL // _BLOCK_SIZE)
        batch = Batch(
            token_ids_T=token_ids_BL.flatten().int(),
            positions_T=positions_BL.flatten().int(),
            slots_LT=(blocks_BL * _BLOCK_SIZE + positions_BL % _BLOCK_SIZE).view(1, -1).int(),
            query_start_B1=torch.arange(0, num_sequences * length + 1, length).int(),
            context_lens_B=torch.full((num_sequences,), context).int(),
            block_tables_LBM=tables_BM.int()[None],
            num_decode_rows=num_sequences if first else 0,
            policy=arm,
        )
        hidden_TD = self._on_ranks(lambda rank: self._models[arm][rank].forward(batch))[0]
        normed_TD = rms_norm(hidden_TD, self._final_norm_D, norm_form(self._config))
        return normed_TD.view(num_sequences, length, -1)

    def _on_ranks(self, call: Callable[[int], _Result]) -> list[_Result]:
        """Run ``call`` on every rank at once; raise the first exception that another rank's failure did not cause."""

        def guarded(rank: int) -> _Result:
            try:
                return call(rank)
            except BaseException:
                self._groups[rank].close()  # unblocks the ranks that wait for this one
                raise

        futures = [self._pool.submit(guarded, rank) for rank in range(self.world_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, CommError))
        return [future.result() for future in futures]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
