"""The check of ``--label``, for benches that do not declare their options with ``bench.options`` yet."""

from tightwire.bench.report import result_files

check_label = result_files.check_label
