"""Warm start: supervised training on demonstrations, before any reward."""
