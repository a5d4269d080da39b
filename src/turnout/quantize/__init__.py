"""Quantised weights for the torch executor: converted while loading, read from formats of others, and judged.

No module here imports PyTorch before it is asked to convert something.
"""
