"""Warm start: supervised training on an expert's demonstrations, before any reward."""
