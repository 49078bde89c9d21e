"""From torch's own layers to te_hal's, in place, with the weights kept."""

from te_hal.converting.conversion import Conversion, Converted, Left
from te_hal.converting.encoder_layer import torch_state_dict
from te_hal.converting.walk import convert

__all__ = ["Conversion", "Converted", "Left", "convert", "torch_state_dict"]
