"""What the paper reports of its probes (its tables of Push-T, TwoRoom and OGBench-Cube), to stand beside ours.

Its "overall" row of Cube is left out: it is not the mean of the rows above it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lewm.understand.targets import Target

# world, property, model | linear: MSE, its ±, r | MLP: MSE, its ±, r
_TABLE = """
tworoom | agent position | DINO-WM | 0.488 0.451 0.824 | 0.000 0.000 0.999
tworoom | agent position | PLDM | 0.008 0.041 0.996 | 0.000 0.000 1.000
tworoom | agent position | LeWM | 0.008 0.018 0.996 | 0.000 0.000 1.000
pusht | agent position | DINO-WM | 1.888 0.500 0.977 | 0.003 0.022 0.999
pusht | agent position | PLDM | 0.090 0.311 0.955 | 0.014 0.119 0.993
pusht | agent position | LeWM | 0.052 0.149 0.974 | 0.004 0.056 0.998
pusht | block position | DINO-WM | 0.006 0.007 0.997 | 0.002 0.003 0.999
pusht | block position | PLDM | 0.122 0.341 0.938 | 0.011 0.066 0.994
pusht | block position | LeWM | 0.029 0.073 0.986 | 0.001 0.006 0.999
pusht | block angle | DINO-WM | 0.050 0.101 0.979 | 0.009 0.052 0.995
pusht | block angle | PLDM | 0.446 0.625 0.745 | 0.056 0.184 0.972
pusht | block angle | LeWM | 0.187 0.359 0.902 | 0.021 0.139 0.990
cube | joint positions | DINO-WM | 0.960 1.150 0.808 | 0.200 0.967 0.870
cube | joint positions | PLDM | 0.372 1.172 0.695 | 0.340 1.164 0.728
cube | joint positions | LeWM | 0.352 1.173 0.706 | 0.330 1.157 0.742
cube | joint velocities | DINO-WM | 0.792 0.748 0.763 | 0.263 0.683 0.852
cube | joint velocities | PLDM | 1.016 0.905 0.115 | 0.661 0.830 0.536
cube | joint velocities | LeWM | 1.021 0.902 0.095 | 0.818 0.899 0.386
cube | effector position | DINO-WM | 0.024 0.010 0.996 | 0.004 0.003 0.999
cube | effector position | PLDM | 0.052 0.073 0.974 | 0.013 0.029 0.993
cube | effector position | LeWM | 0.018 0.025 0.991 | 0.003 0.004 0.998
cube | effector yaw | DINO-WM | 3.317 1.016 0.828 | 0.167 0.168 0.917
cube | effector yaw | PLDM | 0.996 0.165 0.056 | 0.985 0.207 0.117
cube | effector yaw | LeWM | 0.980 0.295 0.124 | 0.952 0.369 0.213
cube | gripper | DINO-WM | 0.114 0.095 0.943 | 0.038 0.060 0.982
cube | gripper | PLDM | 0.234 0.169 0.876 | 0.066 0.111 0.967
cube | gripper | LeWM | 0.121 0.111 0.938 | 0.048 0.079 0.976
cube | block position | DINO-WM | 0.085 0.029 0.991 | 0.007 0.007 0.998
cube | block position | PLDM | 0.031 0.023 0.985 | 0.003 0.004 0.999
cube | block position | LeWM | 0.007 0.010 0.997 | 0.002 0.003 0.999
cube | block quaternion | DINO-WM | 1.596 10.457 0.257 | 0.769 8.046 0.411
cube | block quaternion | PLDM | 1.021 12.600 0.066 | 0.989 12.140 0.218
cube | block quaternion | LeWM | 1.019 12.596 0.087 | 0.963 11.450 0.224
cube | block yaw | DINO-WM | 4.223 2.530 0.176 | 0.916 0.278 0.304
cube | block yaw | PLDM | 0.996 0.088 0.061 | 0.989 0.140 0.106
cube | block yaw | LeWM | 0.996 0.094 0.062 | 0.973 0.199 0.164
"""


@dataclass(frozen=True)
class PaperProbe:
    """One probe of the paper. spread: what it gives behind its ±, without saying over what."""

    mse: float
    spread: float
    r: float


@dataclass(frozen=True)
class PaperRow:
    """One model's row of the paper."""

    model: str
    linear: PaperProbe
    mlp: PaperProbe


@functools.cache
def _rows() -> dict[tuple[str, str], tuple[PaperRow, ...]]:
    found: dict[tuple[str, str], tuple[PaperRow, ...]] = {}
    for line in _TABLE.strip().splitlines():
        world, prop, model, *probes = (cell.strip() for cell in line.split("|"))
        linear, mlp = (PaperProbe(*map(float, probe.split())) for probe in probes)
        found[world, prop] = (*found.get((world, prop), ()), PaperRow(model, linear, mlp))
    return found


def paper_rows(world: str | None, target: Target) -> tuple[PaperRow, ...]:
    """The paper's rows of a target, LeWM's last; none for worlds, properties and forms that it does not have."""
    return _rows().get((world or "", target.quantity), ()) if target.as_published else ()
