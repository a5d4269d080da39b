"""Level 2: the ledger of what was executed."""
