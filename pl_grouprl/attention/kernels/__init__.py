"""The two primitives that the cascade is made of: variable-length attention forward and backward, for each device."""

from pl_grouprl.attention.kernels.call import VarlenCall, VarlenKernel
from pl_grouprl.attention.kernels.cpu import CPUKernel
from pl_grouprl.attention.kernels.cuda import CUDAKernel
from pl_grouprl.attention.kernels.eager import EagerKernel
