"""A model's sizes as its Hugging Face `config.json` states them: shared by the cost models and the engine.

Sizes only. It does not know a tensor, a device, or how the layers are split over stages and ranks.
"""

from playground.model.families import DTYPE_BYTES
from playground.model.parts import Compressed, Experts, Indexer, Latent, Reach
from playground.model.precision import Format, Precision
from playground.model.shape import ModelShape, shipped

__all__ = [
    "DTYPE_BYTES",
    "Compressed",
    "Experts",
    "Format",
    "Indexer",
    "Latent",
    "ModelShape",
    "Precision",
    "Reach",
    "shipped",
]
