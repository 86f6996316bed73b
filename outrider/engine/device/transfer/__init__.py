"""Copies between host and device: CUDA driver calls, pinned buffers, uploads.

buffers.py                 Pinned staging buffers for uploads and downloads; plain memory on a CPU.
cuda_driver.py             CUDA driver calls that keep the GIL, for the thread that launches rounds.
pinned_memory.py           Pins host memory that another owner allocated, so that device copies of
                           it are asynchronous.
uploads.py                 Asynchronous uploads that are independent of rounds, in any number.
"""
