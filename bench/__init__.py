"""Measures the product: ``tightwire bench``, ``tune`` and ``doctor``. Open ``cli.py`` first.

A bench is a folder; ``report/__init__.py`` says how to write one. ``run.py`` runs every bench. Results: ``RESULTS.md``.
"""
