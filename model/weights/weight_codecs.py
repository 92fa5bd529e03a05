"""The codecs that weights may travel in, by the names of ``--weight-codec``. Imports nothing: `--help` reads it."""

# Groups of 64: rows of a model are whole groups, and their scales cost little.
WEIGHT_CODECS = {"none": "none", "int8": "int8-g64", "int4": "int4-g64"}
