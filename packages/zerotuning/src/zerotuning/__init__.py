"""Re-weight the attention to the initial token of a frozen language model, per head."""
