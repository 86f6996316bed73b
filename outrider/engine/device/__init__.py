"""The device engine: rounds that run from static buffers, so that a CUDA graph can replay them."""
