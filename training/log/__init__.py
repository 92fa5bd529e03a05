"""Log file, TensorBoard and terminal output of a run. Start with ``run_log``."""
