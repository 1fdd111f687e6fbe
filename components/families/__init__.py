"""Families of vision-language models, one file each: components, image inputs and a tiny checkpoint. Nothing imports
torch."""
