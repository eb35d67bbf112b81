"""Pictures: one file for each kind, one look for all. A new file here registers itself with `show`."""

from attnlab.registry import import_all

import_all(__path__, __name__)
