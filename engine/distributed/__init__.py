"""More than one process: actors of Ray."""

from engine.distributed.predictor import Predictor

__all__ = ["Predictor"]
