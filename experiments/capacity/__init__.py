"""The largest rate at which objectives hold: `python -m experiments capacity`."""
