"""Compiles what an algorithm's codecs need, before ranks meet: a collective would give up on a rank that compiles."""

import torch

from tightwire.comm.codec import Codec
from tightwire.comm.legs import decode_slices, encode_slices, sum_and_encode
from tightwire.comm.policy import Policy
from tightwire.comm.registry import parse_all_reduce


def warm_up_codecs(policy: Policy, num_elems: int, dtype: torch.dtype, device: torch.device) -> None:
    """Put zeros through both legs of every quantized AllReduce that ``policy`` may use. This rank alone; no waiting.

    Cost: on the CPU seconds for each codec at the first start on a machine, milliseconds afterwards.
    """
    done: set[tuple[Codec, Codec]] = set()
    for name in policy.algorithms:
        codecs = parse_all_reduce(name).codecs
        if all(codec.exact for codec in codecs) or (legs := (codecs[0], codecs[-1])) in done:
            continue
        done.add(legs)
        reduce_codec, gather_codec = legs
        zeros_N = torch.zeros(num_elems, dtype=dtype, device=device)
        (sent,) = encode_slices(zeros_N, [num_elems], reduce_codec)
        own = sum_and_encode([sent, sent], num_elems, reduce_codec, gather_codec, dtype)
        decode_slices([own], [num_elems], gather_codec, dtype)
