"""The project's own laboratory: benches against other servers, float32 answers and rooflines. Start at peers/run."""
