"""Declares what a verb can be told: `option` and the flags that follow from it, and the options of `serve`. Start with `option`."""
