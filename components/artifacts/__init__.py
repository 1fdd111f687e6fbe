"""Artifacts: folders named by what made them, images named by what is in them, tables with versions."""
