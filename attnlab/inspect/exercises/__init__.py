"""The exercises of the notebooks check themselves: `check_exercise("03-2", answer)` says yes, or what is wrong.

A file for each lesson; a new file here registers itself. What is right is computed by the package itself, from the toy
batch of the lessons, and not written down.
"""

from attnlab.inspect.exercises.registry import Verdict, check_exercise
from attnlab.registry import import_all

__all__ = ["Verdict", "check_exercise"]

import_all(__path__, __name__)
