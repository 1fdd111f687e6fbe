"""Measurements, each a ratio of two things in one run on one machine; see docs/benchmarks.md for the figures."""
