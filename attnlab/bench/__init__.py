"""Measuring: correct first, then timed.

A workload (`workload.py`; `workloads.py` lists them) is built (`inputs.py`), held to the oracle (`truth.py`) and timed
(`timing.py`) by every peer (`peer.py`, a file each in `peers/`) in turn (`run.py`). What comes out (`result.py`) is
plain data: `load` reads it where there is no GPU, `compare_runs` (`compare.py`) holds two runs together, `outcomes`
(`goals.py`) holds them to what is to be reached, `attnlab.show` draws one.

The same clocks and the same oracle choose tiles and launch options of kernels: `tune.py` says which rows of the tuning
table a workload is launched by, and what is tried for them, `trials.py` tries it. `warm.py` compiles ahead,
`patience.py` cuts off who takes too long.

`recording.py` measures what recording costs (with the stopwatches of `watch.py` and the binaries of `launches.py`),
`host_side.py` what plans and calls take of the host.
"""

from attnlab.bench.result import Ceilings as Ceilings
from attnlab.bench.result import Result as Result
from attnlab.bench.result import Row as Row
from attnlab.bench.result import load as load
