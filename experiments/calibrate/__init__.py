"""Measuring a backend's steps on purpose: a designed set of shapes, timed one by one, and what cost models make of it."""
