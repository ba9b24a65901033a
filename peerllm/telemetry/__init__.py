"""The round's time ledger, metrics, logging."""
