"""What the engine says when it is given something it cannot use."""

from __future__ import annotations


class EngineError(ValueError):
    """A checkpoint, an option or a device that the engine cannot use: one line with the name, the value and the fix."""


class StepFailed(RuntimeError):
    """A step raised on the worker; the cause is chained."""
