"""Evaluation of robot policies in LIBERO: playing episodes, results, comparisons, videos and reports."""
