"""Where a request's time went, and whose doing it was: `python -m analysis blame`."""
