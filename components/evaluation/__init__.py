"""Evaluation: play every task of a split once or more, and report accuracy by kind with Wilson's interval."""
