"""What every layer needs to know about the tokens at hand."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Tokens(NamedTuple):
    """Computed once per call of the model.

    Attributes:
      positions: int32, restarting in each document.
      segment_ids: int32, 0 for padding.
      cos, sin: rope tables at those positions, float32.
    """

    positions: Int[Array, "b q"]
    segment_ids: Int[Array, "b q"]
    cos: Float[Array, "b q r/2"]
    sin: Float[Array, "b q r/2"]

    @property
    def valid(self) -> Bool[Array, "b q"]:
        return self.segment_ids > 0
