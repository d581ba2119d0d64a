"""A policy's score, for searches by program: `evaluate(policy_path)`, `python -m experiments evaluate`."""

from experiments.evaluate.contract import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
