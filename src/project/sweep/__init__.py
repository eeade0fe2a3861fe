"""The search over configs, and what it found."""
