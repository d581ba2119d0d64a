"""Cost models: what a step costs, its shape turned into seconds of compute, memory, communication and host.

Arithmetic only, in closed form: no clock, no queue, no state. Formulas, sources and gaps: docs/cost-model.md.
"""

from playground.sim.cost.calibrated import Calibrated
from playground.sim.cost.fitted import Fitted
from playground.sim.cost.linear import Linear
from playground.sim.cost.model import IDLE, Cost, CostModel
from playground.sim.cost.profiled import Profiled
from playground.sim.cost.roofline import ATTENTION_TILE, Roofline
from playground.sim.cost.shape import Shape
from playground.sim.cost.vidur import Vidur

__all__ = [
    "ATTENTION_TILE",
    "IDLE",
    "Calibrated",
    "Cost",
    "CostModel",
    "Fitted",
    "Linear",
    "Profiled",
    "Roofline",
    "Shape",
    "Vidur",
]
