"""Which backends the device here has for a geometry; on CPU the Triton ones too, in the interpreter."""

from __future__ import annotations

from pallas_kernels import Backend, Device, Geometry
from pallas_kernels.attention import BACKENDS, unsupported


def serving(device: Device, geometry: Geometry) -> list[Backend]:
    """Every backend but the reference that serves."""
    found = []
    for name in BACKENDS:
        interpret = device.platform == "cpu" and name == "pallas_triton"
        backend = Backend(name, device, interpret)
        if name != "reference" and not unsupported(backend, geometry):
            found.append(backend)
    return found
