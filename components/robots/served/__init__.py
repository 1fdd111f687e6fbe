"""Benchmarks of vla-eval, which run in environments of their own."""
