"""What this machine has: the compiled extension, the kernel cache, NVRTC."""
