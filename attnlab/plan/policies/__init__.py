"""The split policies: one file each. A new file here registers itself."""

from attnlab.registry import import_all

import_all(__path__, __name__)
