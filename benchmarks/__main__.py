"""`python -m benchmarks`: the same as `python -m jax_fp8gemm bench`."""

import sys

from benchmarks import main

if __name__ == "__main__":  # not in processes that it spawns
    sys.exit(main())
