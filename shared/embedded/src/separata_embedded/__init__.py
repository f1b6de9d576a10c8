"""The small real models and texts that demos and tests run on, without a network."""
