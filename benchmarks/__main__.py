"""`python -m benchmarks`: the same as `python -m jax_fp8gemm bench`."""

import sys

from benchmarks import main

sys.exit(main())
