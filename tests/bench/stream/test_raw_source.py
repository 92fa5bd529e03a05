"""A raw source moves exactly the bytes of a pass."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tightwire.bench.stream.raw_source import raw_copies, raw_gathers, raw_reads
from tightwire.comm.group.partition_groups import in_process_partition
from tightwire.model.weights.layer_store import HostStore
from tightwire.model.weights.packed_layer import PackedLayer
from tightwire.model.weights.prepared.blob_file import reads_direct
from tightwire.model.weights.prepared.manifest import Blob

SIZES = (8192, 4096, 12288)


def test_copies_read_the_streamed_layers() -> None:
    layers_stored = [PackedLayer({}, torch.bfloat16, size) for size in SIZES]
    layers = {layer: torch.ones(SIZES[layer], dtype=torch.uint8) for layer in (0, 2)}
    raw_copies(HostStore(layers_stored, layers), (0, 2), torch.device("cpu"))()
    with pytest.raises(KeyError):
        raw_copies(HostStore(layers_stored, layers), (0, 1), torch.device("cpu"))()


@pytest.mark.parametrize("direct", [False, True])
def test_reads_end_with_the_file(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(sum(SIZES)))
    if direct and not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    blobs = [Blob(sum(SIZES[:layer]), size, "") for layer, size in enumerate(SIZES)]
    with raw_reads(path, blobs, direct=direct) as run:
        run()
    with (
        raw_reads(path, [Blob(0, sum(SIZES) + 4096, "")], direct=direct) as run,
        pytest.raises(ValueError, match="ends inside a layer"),
    ):
        run()


def test_gathers_send_the_bytes_of_a_pass() -> None:
    peers = in_process_partition(1, 2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda own: raw_gathers(own, SIZES)(), peers))
    assert [own.inside.bytes_sent for own in peers] == [sum(SIZES) // 2] * 2
