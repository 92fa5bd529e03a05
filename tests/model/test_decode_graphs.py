"""Padding, inputs and counts of replayed steps; a replay here runs the captured function again."""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.model.device_work import DeviceWork
from torch import Tensor

from tightwire.comm.ledger.ledger import Ledger
from tightwire.model import decode_graphs
from tightwire.model.decode_graphs import DecodeGraphs, Replay, graph_sizes
from tightwire.model.step import Batch, StepArrays

_MAX_BLOCKS = 6


class Model:
    """Hidden states that name everything a row was given; one collective a pass."""

    def __init__(self) -> None:
        self.ledger, self.batches, self.replays = Ledger(), list[Batch](), False

    def forward(self, batch: Batch) -> Tensor:
        if not self.replays:
            self.batches.append(batch)
            self.ledger.begin("all_reduce", "one-shot", 100 * len(batch.token_ids_T), batch.phase)
            self.ledger.end(50 * len(batch.token_ids_T))
        columns = (batch.token_ids_T, batch.positions_T, *batch.slots_LT, batch.context_lens_B)
        return torch.cat([torch.stack(columns, 1), *batch.block_tables_LBM], 1) + 1000 * batch.policy


def make_graphs(
    model: Model,
    sizes: tuple[int, ...] = (1, 2, 4, 8),
    num_policies: int = 1,
    *,
    num_groups: int = 1,
    max_blocks: int = _MAX_BLOCKS,
    **options: bool,
) -> DecodeGraphs:
    def capture(run: Callable[[], Tensor]) -> Replay:
        run()

        def replay() -> Tensor:
            model.replays = True
            return run()  # reads the tensors as they are by then

        return replay

    return DecodeGraphs(
        model.forward,
        sizes=sizes,
        num_policies=num_policies,
        num_groups=num_groups,
        max_blocks=max_blocks,
        device=torch.device("cpu"),
        capture=capture,
        ledger=model.ledger,
        **options,
    )


def step(num_rows: int, num_blocks: int = 3, seed: int = 0, num_groups: int = 1) -> StepArrays:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(1, 900, shape, np.int32)

    return StepArrays(
        numbers(num_rows),
        numbers(num_rows),
        numbers(num_groups, num_rows),
        np.arange(num_rows + 1, dtype=np.int32),
        numbers(num_rows),
        numbers(num_groups, num_rows, num_blocks),
        num_rows,
    )


def wanted(arrays: StepArrays, arm: int = 0) -> Tensor:
    columns = (arrays.token_ids_T, arrays.positions_T, *arrays.slots_LT, arrays.context_lens_B)
    return torch.from_numpy(np.concatenate([np.stack(columns, 1), *arrays.block_tables_LBM], 1)) + 1000 * arm


def test_steps_of_every_size_get_their_own_results() -> None:
    graphs = make_graphs(Model())
    for seed, num_rows in enumerate([8, 1, 3, 2, 7, 1, 5, 8]):
        arrays = step(num_rows, seed=seed)
        assert graphs.fits(arrays)
        hidden = graphs.run(arrays, 0)
        assert torch.equal(hidden[:, : 4 + 3], wanted(arrays))


def test_a_graph_keeps_the_tensors_that_it_reads() -> None:
    """A replay reads addresses: another tensor in the place of a freed one would be taken for it."""
    model = Model()

    def capture(run: Callable[[], Tensor]) -> Replay:
        return run().clone

    graphs = DecodeGraphs(
        model.forward,
        sizes=(2,),
        num_policies=1,
        num_groups=1,
        max_blocks=_MAX_BLOCKS,
        device=torch.device("cpu"),
        capture=capture,
        ledger=model.ledger,
    )
    read = [
        weakref.ref(value) for name in Batch.__slots__ if isinstance(value := getattr(model.batches[-1], name), Tensor)
    ]
    model.batches.clear()
    gc.collect()
    assert len(read) >= 6 and all(each() is not None for each in read), graphs


def test_each_group_of_layers_has_its_slots_and_its_table() -> None:
    graphs = make_graphs(Model(), num_groups=3)
    for num_rows in (8, 3):
        arrays = step(num_rows, num_blocks=_MAX_BLOCKS, num_groups=3)
        assert torch.equal(graphs.run(arrays, 0), wanted(arrays))


def test_tables_that_shrink_and_grow_are_those_of_the_step() -> None:
    """In rows that come and go, also of a step whose tables are another size's last ones."""
    graphs = make_graphs(Model(), sizes=(2, 4), num_groups=2)
    sizes = [
        (4, 6, 0),
        (3, 2, 1),
        (3, 2, 1),
        (4, 5, 2),
        (2, 5, 2),
        (4, 5, 2),
        (4, 1, 3),
        (1, 6, 4),
        (3, 6, 4),
        (4, 6, 0),
    ]
    for num_rows, width, seed in sizes:
        arrays = step(num_rows, width, seed, num_groups=2)
        rows = graphs.run(arrays, 0)
        for group, table_BM in enumerate(arrays.block_tables_LBM):
            first = 5 + group * _MAX_BLOCKS
            assert rows[:, first : first + width].tolist() == table_BM.tolist()


def test_a_table_that_the_caller_changes_is_copied_again() -> None:
    graphs, arrays = make_graphs(Model(), sizes=(2,)), step(2)
    graphs.run(arrays, 0)
    arrays.block_tables_LBM[0, 1, 2] += 1
    assert torch.equal(graphs.run(arrays, 0)[:, :7], wanted(arrays))


def test_a_step_copies_what_its_contexts_use_whatever_the_longest_context_is() -> None:
    """4 bytes a number: five fixed ones and a slot a group for each row of the graph, and tables that are new."""

    def copied(max_blocks: int) -> list[int]:
        graphs, sizes = make_graphs(Model(), num_groups=2, max_blocks=max_blocks), list[int]()
        for num_rows, width in ((8, 3), (8, 3), (5, 2), (1, 3)):
            with DeviceWork(torch.device("cpu")) as work:
                graphs.run(step(num_rows, width, num_groups=2), 0)
            sizes.append(work.copied_bytes)
        return sizes

    fixed = 4 * (5 + 2)
    assert copied(6) == copied(6000) == [8 * (fixed + 24), 8 * fixed, 8 * fixed + 5 * 2 * 8, fixed + 24]


def test_rows_beyond_the_step_become_padding_again() -> None:
    model = Model()
    graphs = make_graphs(model, sizes=(4,))
    graphs.run(step(4), 0)
    graphs.run(step(1, seed=1), 0)
    batch = model.batches[-1]
    assert batch.slots_LT[:, 1:].tolist() == [[-1] * 3]
    assert (
        batch.context_lens_B[1:].tolist() == batch.positions_T[1:].tolist() == batch.token_ids_T[1:].tolist() == [0] * 3
    )
    assert batch.query_start_B1.tolist() == [0, 1, 2, 3, 4] and batch.num_decode_rows == 4


def test_deferred_tokens_are_resolved_in_the_graphs_own_tokens() -> None:
    graphs = make_graphs(Model())
    arrays = step(3)
    arrays.token_ids_T[:] = [-2, 9, -1]
    hidden = graphs.run(arrays, 0, torch.tensor([70, 80, 90], dtype=torch.int32))
    assert hidden[:, 0].tolist() == [80, 9, 70]
    assert torch.equal(hidden[:, 1:7], wanted(arrays)[:, 1:])


def test_deferred_tokens_without_a_choice_become_token_0() -> None:
    arrays = step(2)
    arrays.token_ids_T[:] = [-1, -8]
    chosen_R = torch.tensor([-1, *range(2, 8), 70], dtype=torch.int32)
    assert make_graphs(Model()).run(arrays, 0, chosen_R)[:, 0].tolist() == [0, 70]


def test_more_chosen_tokens_than_the_largest_graph_has_rows_fit_none() -> None:
    graphs, arrays = make_graphs(Model(), sizes=(2, 4)), step(2)
    for token_id, fits in ((-4, True), (-5, False)):
        arrays.token_ids_T[1] = token_id
        assert graphs.fits(arrays) == fits


def test_each_policy_has_its_own_graphs() -> None:
    graphs = make_graphs(Model(), num_policies=2)
    arrays = step(3)
    assert torch.equal(graphs.run(arrays, 1)[:, :7], wanted(arrays, 1))
    assert torch.equal(graphs.run(arrays, 0)[:, :7], wanted(arrays, 0))


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    model = Model()
    graphs = make_graphs(model, has_adapters=True)
    for slots in ([2, -1, 0], None, [1, 1, 1]):
        adapters_T = None if slots is None else np.array(slots, np.int32)
        graphs.run(replace(step(3), adapters_T=adapters_T), 0)
    adapted = [
        batch.adapters_T for batch in model.batches if batch.adapters_T is not None and len(batch.adapters_T) == 4
    ]
    assert adapted[-1].tolist() == [1, 1, 1, -1]
    assert len(model.batches) == 2 * 2 * 4  # each of four sizes with and without, run once before it is captured


@pytest.mark.parametrize(
    ("query_lens", "num_decode", "fits"),
    [([1, 1], 2, True), ([1, 1], 1, False), ([2, 1], 3, False), ([1] * 9, 9, False), ([5], 0, False)],
)
def test_only_decode_rows_one_a_sequence_are_replayed(query_lens: list[int], num_decode: int, fits: bool) -> None:
    graphs = make_graphs(Model())
    total, num_seqs = sum(query_lens), len(query_lens)
    rows, seqs = np.ones(total, np.int32), np.ones(num_seqs, np.int32)
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    arrays = StepArrays(rows, rows, rows, starts, seqs, np.ones((num_seqs, 1), "i4"), num_decode)
    assert graphs.fits(arrays) == fits


def test_a_replays_collectives_are_counted_with_its_padding() -> None:
    model = Model()
    graphs = make_graphs(model)
    [before] = model.ledger.counters.counts()
    number = model.ledger.number
    graphs.run(step(3), 0)
    graphs.run(step(1), 0)
    [after] = model.ledger.counters.counts()
    added = after.since(before)
    assert (added.phase, added.calls, added.bytes_sent, added.message_bytes, added.seconds) == (
        "decode",
        2,
        250,
        500,
        0,
    )
    assert model.ledger.number == number + 2


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_sizes(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(("seconds", "is_faster"), [(1.97, False), (1.95, True)])
def test_the_clearly_faster_form_of_one_row_is_kept(
    seconds: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all policies, and for one row without an adapter alone."""

    class Forms(Model):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward(batch) + 10_000 * batch.fuses

    timed = list[int]()
    monkeypatch.setattr(decode_graphs, "_times_s", lambda forms: (timed.append(len(forms)), [2.0, seconds])[1])
    model = Forms()
    graphs = make_graphs(model, num_policies=2, has_adapters=True, fuses=True)
    assert timed == [2]
    assert {(len(each.token_ids_T), each.adapters_T) for each in model.batches if each.fuses} == {(1, None)}
    kept = "in kernels of products" if is_faster else "in their own kernels"
    told = f"{1000 * seconds:.2f} ms a step in those of products, 2000.00 in their own"
    assert graphs.note == f"one row: norms, rotations and SwiGLU {kept}; {told}"
    for num_rows, adapters_T in itertools.product((1, 2), (None, np.zeros(2, np.int32))):
        arrays = replace(step(num_rows), adapters_T=None if adapters_T is None else adapters_T[:num_rows])
        for policy in (0, 1):
            fused = 10_000 * (is_faster and num_rows == 1 and adapters_T is None)
            assert torch.equal(graphs.run(arrays, policy)[:, : 4 + 3], wanted(arrays, policy) + fused)
    without = make_graphs(Forms(), sizes=(2, 4), fuses=True)
    assert not without.note and len(timed) == 1


def test_a_forms_time_is_that_of_its_fastest_replay_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are replayed in turn, so neither has the device when it is warmer."""
    now_s, order, lengths = 0.0, list[int](), ([0.5, 4, 3, 2, 5, 6], [9, 7, 8, 9, 9, 1])

    def form(number: int) -> Replay:
        def replay() -> Tensor:
            nonlocal now_s
            now_s += lengths[number][order.count(number)]
            order.append(number)
            return torch.empty(0)

        return replay

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(decode_graphs.time, "perf_counter", lambda: now_s)
    assert decode_graphs._times_s([form(0), form(1)]) == [2, 1]
    assert order == [0, 1] * 6
