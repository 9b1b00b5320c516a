"""The worker: consumption in exact shares, claims, dead letters. Everything here runs in worker processes only."""
