"""How a verb declares its options, and the options of `serve`. Start with `option`; the flags follow from it in `flags`."""
