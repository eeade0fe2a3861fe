"""What each rank does: the Trainer, its loops and step, checkpoints, predictions, and what a terminal shows of it."""
