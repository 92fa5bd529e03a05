"""Weights of one rank: resident, streamed or partitioned. Start with `source`, then `load`."""

# Codecs of streamed layers, by the names of --weight-codec. They are here because `--help` must not import torch.
# Groups of 64: rows of a model are whole groups, and their scales take few bytes.
WEIGHT_CODECS = {"none": "none", "int8": "int8-g64", "int4": "int4-g64"}
