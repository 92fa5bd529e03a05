"""Compares what `tightwire explain --hosts` predicts with servers on emulated hosts. Start with `bench`."""
