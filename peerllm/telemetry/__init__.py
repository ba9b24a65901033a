"""The round's time ledger, the event loop's watchdog, logging.

`ledger` needs the standard library alone; `watchdog` and `logging` need structlog.
"""
