"""Compile the Triton kernels of a verl job for GPUs that are not here, and run their fp16 arithmetic on the CPU."""
