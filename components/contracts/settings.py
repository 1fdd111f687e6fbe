"""The base of every settings section: validated, frozen, and strict about unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Values that change results. Fields have no defaults: the values live in `configs/`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
