"""The parts of a bench's result: tables, plots, HTML page, statistics, files, environment. Knows no ranks.

How to write a bench (``bench.comm`` is the example; 3 to 6 files: options, what ranks do, cells, page, bench):

1. Options: a frozen dataclass that inherits ``bench.options.OutputOptions``; each field is an ``option(default, help)`` with
   ``choices``, ``metavar``, ``parse`` or ``flag`` where needed; ``__post_init__`` raises ValueError for what cannot be.
2. ``main(argv)``: ``return MyBench(parse_options(MyOptions, argv, verb=..., description=...)).run()``.
3. ``MyBench(bench.run.Bench)`` sets ``verb``, ``metrics`` and ``failures`` (exception type, exit code), fills ``self.facts``,
   and in ``measure()`` prints tables and calls ``self.keep()`` after each round. Raise ``BenchFailedError`` for a wrong
   answer. ``run()`` does the rest: files, Ctrl-C, the JSON line, the exit code.
4. ``cells()``: plain dicts with ``name`` and ``samples`` ({metric: [raw values, None where one is missing]}); other bulky
   data goes under ``raw``. The line on stdout leaves out ``samples`` and ``raw``. ``bench compare`` reads all benches so.
5. Columns once: ``Column(heading, key, format, scale)``; ``Table(columns, rows)`` goes to ``print_table``, to ``Bench.csv``
   and into a page's ``Section(table=...)``. ``Bench.sections`` returns the sections of the page; heading, error and facts are
   added. Plots are values (``plots.lines(rows, by=..., x=column, y=column)``) for ``plot_section``; drawing alone imports
   matplotlib, so pages are imported at the top of the file.
"""
