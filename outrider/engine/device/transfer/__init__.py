"""Copies between host and device: CUDA driver calls, pinned buffers, uploads.

buffers.py                 Pinned staging buffers for uploads and downloads.
cuda_driver.py             CUDA driver calls that keep the GIL, for the thread that launches rounds.
pinned_memory.py           Pins host memory that was not allocated by torch, so that copies from and
                           to it are asynchronous.
uploads.py                 Asynchronous uploads to the device, of which any number may be in
                           progress.
"""
