"""The daemon: one asyncio loop that puts the parts together. It never imports torch."""
