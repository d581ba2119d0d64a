"""A run or a sweep as one page: `python -m analysis report`."""
