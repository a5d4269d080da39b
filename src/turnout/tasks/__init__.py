"""Level 1: what requests and results mean, and how they become model inputs and outputs."""
