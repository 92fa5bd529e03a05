"""What a measurement is kept and shown in: result files, pages, plots, statistics, and where it was made. Knows no ranks."""
