"""Compare ways to train, each in fresh processes, in turns, on the same model and data."""
