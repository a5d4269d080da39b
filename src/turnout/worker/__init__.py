"""Level 4: one process per loaded model; the crash boundary."""
