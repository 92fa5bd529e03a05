"""Old name of ``report.console``."""

from tightwire.bench.report import console

paused, progress_bar = console.paused, console.progress_bar
