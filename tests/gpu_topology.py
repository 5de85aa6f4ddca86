"""H100s that are not there: XLA compiles programs for them, with our kernels, on any machine."""

import functools

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

# What XLA asks of a GPU, read from an H100 (SXM, 80 GB), as its GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# No GPU is there to time XLA's own products on.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}


@functools.cache
def mesh(axis: str) -> Mesh:
    """Two H100s on one Auto axis."""
    topology = topologies.get_topology_desc(
        "h100s", platform="cuda", target_config=_H100, topology="1x1x2"
    )
    return jax.make_mesh((2,), (axis,), axis_types=(AxisType.Auto,), devices=topology.devices)
