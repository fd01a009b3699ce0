"""One set of names for Gluon in Triton 3.6 to 3.9; the kernels were compiled with 3.6, 3.8 and 3.9.

Raises ImportError with any other version, as Gluon's API still changes; Triton kernels and cuBLAS then take over.
"""

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

if not (3, 6) <= tuple(int(number) for number in triton.__version__.split(".")[:2]) <= (3, 9):
    raise ImportError(f"the Gluon kernels were not tried with Triton {triton.__version__}")

async_load = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
tma_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
tma_store_wait = hopper.tma.store_wait
commit_group, wait_group = hopper.async_copy.commit_group, hopper.async_copy.wait_group
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
fence_async_shared, mbarrier = hopper.fence_async_shared, hopper.mbarrier
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copies_arrive = hopper.async_copy.mbarrier_arrive
