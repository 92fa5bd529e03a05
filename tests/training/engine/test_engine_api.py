"""The engine's other methods, and its errors for wrong use and lost ranks."""

import copy
import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.training_ranks import (
    adamw,
    batches_of,
    loss_of,
    open_engine,
    reference,
    run_groups,
    run_training,
    train,
)
from torch import Tensor

from tightwire.comm.errors import CollectiveTimeoutError, PeerLostError
from tightwire.training.config.optimizer import DgcOptions
from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import Bucket, plan_buckets
from tightwire.training.engine.gathered_weights import Weights
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import TrainGroups

ZERO3 = EngineOptions()
TOKENS = torch.arange(12).view(1, 12)


def alone() -> TrainGroups:
    return in_process_train_groups(1)[0]


@pytest.mark.parametrize("name", SHARDINGS)
def test_an_evaluation_equals_the_model(name: str) -> None:
    model = small_llama(frozen=("model.layers.0",))
    models, want = [copy.deepcopy(model) for _ in range(4)], model(TOKENS).logits

    def run_rank(groups: TrainGroups) -> Tensor:
        own = models[groups.main.rank]
        with open_engine(own, groups, replace(ZERO3, sharding=SHARDINGS[name])) as engine, engine.evaluation():
            own(TOKENS)
            return own(TOKENS).logits

    for logits in run_groups(in_process_train_groups(4, num_nodes=2), run_rank):
        assert torch.equal(logits, want)
        assert not logits.requires_grad


def test_a_model_on_the_meta_device_is_loaded_and_read_back() -> None:
    model = small_llama(tie_word_embeddings=True, frozen=("model.layers.1",))
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def run_rank(groups: TrainGroups) -> None:
        with torch.device("meta"):
            own = small_llama(tie_word_embeddings=True, frozen=("model.layers.1",))
        with open_engine(own, groups, ZERO3) as engine:
            engine.load_full(lambda name: given[name])
            got = {name: tensor.clone() for name, tensor in engine.full_tensors()}
            trained = {name for name in given if not name.startswith("model.layers.1.")}
            assert got.keys() == trained
            assert all(torch.equal(got[name], given[name]) for name in trained)
            with pytest.raises(ValueError, match=r"embed_tokens.weight must have shape \(80, 32\), got \(3,\)"):
                engine.load_full(lambda name: torch.zeros(3))

    run_groups(in_process_train_groups(2), run_rank)


@pytest.mark.parametrize("name", SHARDINGS)
def test_clipping_uses_the_norm_over_all_ranks(name: str) -> None:
    model, batches, options = small_llama(), batches_of(4, 1, 1), replace(ZERO3, sharding=SHARDINGS[name])

    runs = run_training(model, options, batches, num_nodes=2, max_norm=0.01)

    gradients = reference(model, options, batches, num_nodes=2)[0].gradients[0]
    want = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in gradients.values()]))
    assert runs[0].norms[0] == pytest.approx(float(want), rel=1e-6)
    assert len({run.norms[0] for run in runs}) == 1
    assert all(torch.equal(run.parameters[n], runs[0].parameters[n]) for run in runs for n in run.parameters)


@pytest.mark.parametrize("sharding", ["none", "hybrid"])
@pytest.mark.parametrize("begin", [0, 9])
def test_dgc_clips_the_norm_over_the_whole_gradient(begin: int, sharding: str) -> None:
    """Each of N equal replicas clips its own to N^1/2 times the norm: a dense step that clips to that, at no sparsity and before."""
    model, options, sgd = small_llama(), replace(ZERO3, sharding=SHARDINGS[sharding]), partial(torch.optim.SGD, lr=1.0)
    ranks, num_nodes, max_norm = ([0, 0], 1, 0.01) if sharding == "none" else ([0, 1, 0, 1], 2, 0.01)
    batches = batches_of(2, 2, 1)[:, :, ranks]
    sparse = {"sparsity": (0.0,), "momentum": 0, "dense_below": 0, "rampup_begin_step": begin}
    dgc = DgcOptions(**sparse, clip_norm=max_norm, clip="global")
    models = [copy.deepcopy(model) for _ in ranks]

    def run_rank(groups: TrainGroups) -> dict[str, Tensor]:
        own = models[groups.main.rank]
        with open_engine(own, groups, options, compressor=dgc) as engine:
            return train(engine, own, batches, groups.main.rank, sgd).parameters

    results = run_groups(in_process_train_groups(len(ranks), num_nodes), run_rank)

    want, *_ = run_training(model, options, batches, num_nodes, optimizer=sgd, max_norm=max_norm * 2**0.5)
    for parameters in results:
        for name, tensor in want.parameters.items():
            # Each parameter has moved by far more than this.
            assert torch.allclose(parameters[name], tensor, rtol=0, atol=1e-6), name


def test_bfloat16_computes_on_rounded_weights_and_steps_on_exact_ones() -> None:
    model, batches = small_llama(), batches_of(1, num_steps=4, accumulation=2)

    model.bfloat16()
    got = run_training(model, replace(ZERO3, compute_dtype=torch.bfloat16), batches)[0]

    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer, losses = adamw(masters), []
    for step in batches:
        for micro in step:
            loss = loss_of(model, micro[0])
            losses.append(loss.item())
            (loss / len(step)).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float() + (0 if master.grad is None else master.grad)
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
    assert got.losses == losses
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(got.parameters[name], master) for name, master in zip(names, masters, strict=True))


def test_a_rank_that_fails_frees_the_others() -> None:
    models, start_s = [small_llama() for _ in range(2)], time.monotonic()

    def run_rank(groups: TrainGroups) -> None:
        own = models[groups.main.rank]
        with open_engine(own, groups, ZERO3) as engine:
            if groups.main.rank == 1:
                raise ZeroDivisionError
            with pytest.raises(PeerLostError, match="lost rank 1"):
                train(engine, own, batches_of(2, 1, 1), groups.main.rank)

    with pytest.raises(ZeroDivisionError):
        run_groups(in_process_train_groups(2, timeout_s=120.0), run_rank)
    assert time.monotonic() - start_s < 60


def test_a_missing_rank_is_named() -> None:
    models = [small_llama() for _ in range(4)]

    def run_rank(groups: TrainGroups) -> None:
        own = models[groups.main.rank]
        with open_engine(own, groups, ZERO3) as engine:
            if groups.main.rank == 3:
                time.sleep(2)
                return
            with pytest.raises(CollectiveTimeoutError, match="rank 3"):
                train(engine, own, batches_of(4, 1, 1), groups.main.rank)

    run_groups(in_process_train_groups(4, timeout_s=0.5), run_rank)


def test_backward_raises_the_error_of_the_lane() -> None:
    """The lane's error comes out of ``loss.backward()`` as it is."""
    models = [small_llama() for _ in range(2)]

    def run_rank(groups: TrainGroups) -> None:
        own = models[groups.main.rank]
        with open_engine(own, groups, ZERO3) as engine, engine.micro_batch(last=True):
            loss = loss_of(own, TOKENS)
            if groups.main.rank == 0:
                with pytest.raises(PeerLostError, match="lost rank 1"):
                    loss.backward()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run_groups(in_process_train_groups(2), run_rank)


def test_wrong_use_is_an_error() -> None:
    model, options = small_llama(), replace(ZERO3, checkpoint_blocks=4)
    with open_engine(model, alone(), options) as engine:
        with pytest.raises(RuntimeError, match=r"run it inside engine\.micro_batch"):
            model(TOKENS)
        with engine.evaluation(), pytest.raises(RuntimeError, match="is running"), engine.micro_batch(last=True):
            pass
        with pytest.raises(RuntimeError, match="pass last=True"):
            engine.finish_gradients()
        with engine.evaluation(), pytest.raises(RuntimeError, match="is running"):
            engine.weights_changed()
        with pytest.raises(ZeroDivisionError), engine.micro_batch(last=True):
            _ = 1 / 0
        with pytest.raises(RuntimeError, match="close the engine"), engine.evaluation():
            pass


def test_a_block_is_called_once_in_a_micro_batch() -> None:
    model = small_llama()
    with (
        open_engine(model, alone(), ZERO3) as engine,
        pytest.raises(RuntimeError, match=r"blocks\.0 was called twice"),
        engine.micro_batch(last=True),
    ):
        model(TOKENS)
        model(TOKENS)


def test_gradients_after_the_last_micro_batch_are_refused() -> None:
    model = small_llama()
    with open_engine(model, alone(), ZERO3) as engine:
        for last in (True, False):
            with engine.micro_batch(last=last):
                loss = loss_of(model, TOKENS)
                if last:
                    loss.backward()
                else:
                    with pytest.raises(RuntimeError, match="after they were reduced"):
                        loss.backward()


@pytest.mark.parametrize(
    ("prefetch", "in_forward", "in_backward"),
    [("explicit", True, True), ("forward", True, False), ("backward", False, True), ("implicit", False, False)],
)
def test_blocks_are_requested_ahead_in_the_passes_that_prefetch(
    prefetch: Any, in_forward: bool, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Callable[[Weights, Bucket], None]:
        own = getattr(Weights, name)

        def run(self: Weights, bucket: Bucket) -> None:
            calls.append(f"{name} {bucket.name}")
            own(self, bucket)

        return run

    for name in ("request", "use"):
        monkeypatch.setattr(Weights, name, recorded(name))

    run_training(small_llama(), replace(ZERO3, prefetch=prefetch), batches_of(1, num_steps=1, accumulation=1))

    # The last two of four blocks keep their weights, so backward gathers blocks 1 and 0 again.
    turn = calls.index("use blocks.3") + 1
    forward, backward = calls[:turn], calls[turn:]
    assert (forward.index("request blocks.2") < forward.index("use blocks.1")) == in_forward
    assert (backward.index("request blocks.0") < backward.index("use blocks.1")) == in_backward


@pytest.mark.parametrize("prefetch", ["explicit", "forward", "backward", "implicit"])
def test_a_forward_without_backward_leaves_no_state(prefetch: Any) -> None:
    model, want = small_llama(), small_llama()
    with open_engine(model, alone(), replace(ZERO3, prefetch=prefetch)) as engine:
        for last in (False, True):
            with engine.micro_batch(last=last):
                loss_of(model, TOKENS)
        engine.finish_gradients()
        assert all(not main.grad.any() for _, main in engine.named_flat_params() if main.grad is not None)
        engine.weights_changed()
        with engine.evaluation():
            assert torch.equal(model(TOKENS).logits, want(TOKENS).logits)


@pytest.mark.parametrize("checkpoint_blocks", [0, 1])
def test_a_micro_batch_leaves_nothing_behind(checkpoint_blocks: int) -> None:
    """A circle through a graph is never freed: a run would grow with every micro-batch and block, for as long as it goes on."""
    model = small_llama()
    with open_engine(model, alone(), replace(ZERO3, checkpoint_blocks=checkpoint_blocks)) as engine:
        for last in (False, True):
            with engine.micro_batch(last=last):
                run = weakref.ref(engine._hooks._current())
                model(TOKENS, labels=TOKENS).loss.backward()
            gc.collect()
            assert run() is None
        engine.finish_gradients()


def test_groups_and_plan_must_match() -> None:
    model, groups = small_llama(), in_process_train_groups(2)[0]
    with pytest.raises(ValueError, match="plan is for 1 shards; sharding zero3 of 2 ranks on 1 nodes needs 2"):
        Engine(model, plan_buckets(model, 1), groups, ZERO3)
    with pytest.raises(ValueError, match=r"pass a compressor that sums over them"):
        Engine(model, plan_buckets(model, 1), groups, replace(ZERO3, sharding=SHARDINGS["none"]))
