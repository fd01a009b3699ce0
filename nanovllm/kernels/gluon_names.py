"""What the Gluon kernels use of Gluon, under one name in all versions of Triton: 3.6 to 3.9 compile them.

Importing it raises ImportError or AttributeError where Triton has no Gluon, or has it otherwise.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

async_load = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
commit_group, wait_group = hopper.async_copy.commit_group, hopper.async_copy.wait_group
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
warpgroup_mma_init, fence_async_shared, mbarrier = hopper.warpgroup_mma_init, hopper.fence_async_shared, hopper.mbarrier
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
