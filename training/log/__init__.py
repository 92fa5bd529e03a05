"""Log file, TensorBoard, loss plot and terminal output of a run. Start with ``run_log``."""
