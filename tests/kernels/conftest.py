"""Kernels compiled by these tests are cached where the program's are: in a directory named by their sources.

Numba's own place, next to the sources, would keep a kernel whose helper in another file was edited since.
"""

import numba

from strata_jit.kernels.cache import open_cache

if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(open_cache().path)
