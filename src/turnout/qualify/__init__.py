"""Suites that measure a loaded case: speed and numerical quality."""
