"""Fine-tuning of robot policies on demonstrations."""
