"""How many tokens replicas that share experts compute at the same time: what each must know of the others."""

from __future__ import annotations

from collections.abc import Mapping

Passes = tuple[tuple[int, ...], ...]
"""Tokens of every replica in each pass: in one, or in two where all of them compute halves by turns."""

Pooled = Mapping[str, Passes]
"""By lane, all lanes of the step in order; none for copies, which are no joint work."""

ALONE: Pooled = {}
"""Nobody else takes part."""
