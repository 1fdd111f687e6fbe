"""Tiny checkpoints of every model family, made in seconds from a seed."""

from armature.components.models.tiny.build import SMALL, make_tiny_checkpoint
from armature.components.models.tiny.format import format_pretraining

__all__ = ["SMALL", "format_pretraining", "make_tiny_checkpoint"]
