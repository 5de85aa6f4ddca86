"""The GPUs that the kernels are for: Hopper, that is H100 and H200.

An architecture that is added gets a module like this one beside it. ffi/hopper.h has what the
C++ side knows.
"""

ARCHITECTURE = "sm90a"
COMPUTE_CAPABILITY = (9, 0)

# Multiprocessors of H100 and H200 SXM. Tile configs are chosen for this number where no GPU says
# another one, and they were measured with it.
NUM_SMS = 132
