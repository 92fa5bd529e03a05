"""The parts of a bench's result: tables, plots, HTML page, statistics, files, environment.

How to write a bench (``bench.comm`` is the example): an options class that inherits ``bench.options.OutputOptions``, an entry
of ``bench.cli.VERBS``, and a class ``MyBench(bench.run.Bench[MyOptions])``. Its ``measure()`` fills ``self.facts`` and ``self.measured``,
prints tables and calls ``keep()`` after each round; ``run()`` does the rest. Cells are plain dicts with ``name`` and ``samples``
({metric: [raw values, None where one is missing]}); other bulky data goes under ``raw``. ``Column(heading, key, format, scale)``
serves terminal, CSV and page; ``sections()`` lists the plots (``report.page``), tables and texts of the page.
"""
