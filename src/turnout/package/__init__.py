"""Level 1: reading packages without executing them."""
