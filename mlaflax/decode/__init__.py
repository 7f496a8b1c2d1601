"""The decode engine: jitted prefill and decode over a latent cache, sampling, streaming text."""

from mlaflax.decode.engine import Completion, Engine, EngineConfig, Event, cut
from mlaflax.decode.sampling import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Event", "SamplingParams", "cut"]
