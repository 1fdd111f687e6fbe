"""Data types and protocols that several packages share. Imports neither torch nor any other package of Armature."""
