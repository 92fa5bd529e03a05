"""Measures the product: ``tightwire bench``, ``tune`` and ``doctor``. Open ``cli.py`` first, and ``report/__init__.py`` to write one.

A bench is a folder. ``options.py`` declares flags and ``run.py`` is the course of every run; ``client.py`` measures one
streamed request; ``RESULTS.md`` has the results.
"""
