"""The generation engine: one scheduler, sampler and stream over several executors."""
