"""The cascade's two primitives, variable-length attention forward and backward, for each device."""

from pl_grouprl.attention.backends.kernels.call import (
    Index,
    VarlenCall,
    VarlenKernel,
    has_fused_kernel,
    head_multiple,
    put,
    take,
)
from pl_grouprl.attention.backends.kernels.cpu import CPUKernel
from pl_grouprl.attention.backends.kernels.cuda import CUDAKernel
from pl_grouprl.attention.backends.kernels.eager import EagerKernel
