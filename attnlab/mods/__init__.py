"""What happens to scores between the dot product and the mask: soft cap, temperature, and modifiers by name."""

from attnlab.registry import import_all

import_all(__path__, __name__)
