"""The driver of the lane under test, for workers that run in folders of their own."""

from __future__ import annotations

import os
import pathlib

import pytest

__all__ = ["use_lane_driver"]


def use_lane_driver(patch: pytest.MonkeyPatch, shaders: pathlib.Path) -> None:
    """Makes the paths to it absolute, and lets workers share the kernels that it compiles.

    A software driver takes its time for that; what one worker's has compiled, the next one takes
    from the folder `shaders`.
    """
    for name in ("LD_LIBRARY_PATH", "VK_DRIVER_FILES"):
        if name in os.environ:
            patch.setenv(name, str(pathlib.Path(os.environ[name]).absolute()))
    patch.delenv("MESA_SHADER_CACHE_DISABLE", raising=False)
    patch.setenv("MESA_SHADER_CACHE_DIR", str(shaders))
