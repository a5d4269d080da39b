"""Levels 2 and 3: what backends are asked, how verdicts are made, and the backends themselves."""
