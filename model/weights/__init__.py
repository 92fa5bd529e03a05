"""Weights of one rank: resident, streamed or partitioned. Start with `source`, then `load`."""

# Codecs of streamed layers by --weight-codec name. They are defined here because `--help` must not import torch.
# Groups have 64 numbers: a model's rows are whole groups, and the scales take few bytes.
WEIGHT_CODECS = {"none": "none", "int8": "int8-g64", "int4": "int4-g64"}
