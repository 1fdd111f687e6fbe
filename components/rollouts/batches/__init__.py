"""Batches: rollouts turned into training samples with advantages, in a Parquet table."""
