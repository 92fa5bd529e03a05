"""Measures the product: ``tightwire bench``, ``tune`` and ``doctor``. Open ``cli.py`` first; ``report/__init__.py`` says how to write a bench.

A bench is a folder. ``options.py`` declares flags, ``run.py`` runs every bench, ``client.py`` measures one streamed request,
and ``ranks.py`` starts rank processes. ``RESULTS.md`` has the results.
"""
