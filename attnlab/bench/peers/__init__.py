"""The peers: one file each. A new file here registers itself. Their order is that of the columns."""

from attnlab.bench.peers import own as own  # its columns come first
from attnlab.registry import import_all

import_all(__path__, __name__)
