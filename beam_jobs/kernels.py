"""How numba kernels are compiled here: without the GIL, kept on disk where there is a place for it.

>>> @kernel
... def double(x):
...     return 2 * x
>>> double(4)
8
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function on its first call, keeps the machine code for later processes.

    The code lies beside the source or in the user's cache directory; where neither can be
    written, in the temporary directory of this user; and where that fails too, nowhere.

    Args:
        function: module-level, in numba's subset of Python.

    Returns:
        The compiled function; it releases the GIL while it runs.

    Raises:
        numba.core.errors.NumbaError: on the first call, if the function can't be compiled.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "cannot cache function ...: no locator available"
        try:
            numba.config.CACHE_DIR = os.path.join(tempfile.gettempdir(), f"tfpipe-kernels-{os.getuid()}")
            return numba.njit(nogil=True, cache=True)(function)
        except (RuntimeError, OSError):
            return numba.njit(nogil=True)(function)
