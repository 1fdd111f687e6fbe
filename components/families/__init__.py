"""Families of vision-language models, one file each: parts, image inputs and a tiny checkpoint. Torch-free."""
