"""Copies between host and device: CUDA driver calls, pinned buffers, uploads.

buffers.py                 Pinned buffers for uploads and downloads.
cuda_driver.py             Calls of the CUDA driver without releasing the GIL.
pinned_memory.py           Pins memory that others allocated.
uploads.py                 Uploads that are independent of rounds.
"""
