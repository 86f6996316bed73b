"""Seeded runs of a whole fleet under faults, in one process or in several: `outrider chaos`."""

from __future__ import annotations
