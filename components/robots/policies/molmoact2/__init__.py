"""MolmoAct2 (arXiv 2605.02881) on transformers' native Molmo2."""
