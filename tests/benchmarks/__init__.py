"""Benchmarks: each runs both sides in one run and ends with one JSON line, also written to build/bench/NAME.json."""
