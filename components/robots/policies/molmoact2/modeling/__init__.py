"""The network: native Molmo2, the action expert, and what is minimized."""
