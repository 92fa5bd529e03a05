"""The parts of a bench's result: tables, plots, HTML page, statistics, files, environment.

How to write a bench (``bench.comm`` is the example):

1. Options: a frozen dataclass that inherits ``bench.options.OutputOptions``; each field is an ``option(default, help)``;
   ``__post_init__`` raises ValueError for values that do not fit together.
2. A line of ``bench.cli.VERBS`` names ``MyBench.main``.
3. ``MyBench(bench.run.Bench[MyOptions])`` sets ``verb``, ``options_type``, ``description``, ``metrics``, ``columns`` and ``failures``
   (exception type, exit code), reads ``self.options``, fills ``self.facts`` and ``self.measured``, and in ``measure()`` prints (``print``, ``print_table``, ``note``) and calls ``keep()`` after each round. A
   ``with self.watch_others():`` around the measurement records the load of other programs. Raise ``BenchFailedError`` for a
   wrong answer. ``run()`` does the rest: files, Ctrl-C, the JSON line, the exit code.
4. Cells are plain dicts with ``name`` and ``samples`` ({metric: [raw values, None where one is missing]}); other bulky
   data goes under ``raw``. The line on stdout leaves out ``samples`` and ``raw``. ``bench compare`` reads all benches so.
5. ``Column(heading, key, format, scale)``: ``columns`` are those of the CSV file; ``Table(columns, rows)`` goes to ``print_table``
   and to the page.
6. ``sections()`` lists the parts of the page: ``Table``, ``Text``, and plots by ``lines``, ``bars``, ``ecdf`` and ``heat_map`` of
   ``report.page``, which take rows and columns. Heading, errors and facts are added.
"""
