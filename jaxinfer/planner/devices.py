"""Sheets of devices: what the maker states, dense rates (without sparsity), decimal bytes per second.

Sources: NVIDIA's data sheets "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "HGX
B200", "L4 Tensor Core GPU", "L40S", "A10" and the Ada architecture white paper (RTX 4090). Where a sheet
prints rates with sparsity, half of them stand here. `memory_bytes` is what the driver reports as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.core import ConfigError

TERA = 1e12
MIB = 2**20


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """One device. `bandwidth` of its memory and `link_bandwidth` to its peers (one direction) in bytes/s,
    `rates` in operations/s by dtype ("float32": as XLA multiplies by default, TF32 on NVIDIA)."""

    name: str
    memory_bytes: int
    bandwidth: float
    rates: dict[str, float]
    link_bandwidth: float
    source: str
    platform: str = "gpu"

    def rate(self, dtype: str) -> float:
        """Operations/s of a product in `dtype`; float16 as bfloat16."""
        name = "bfloat16" if dtype == "float16" else dtype
        return self.rates.get(name) or self.rates["bfloat16"]

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which a program is bound by compute (Williams et al. 2009, roofline)."""
        return self.rate(dtype) / self.bandwidth


def _gpu(
    name: str, mib: int, gb_s: float, tf32: float, bf16: float, int8: float, fp8: float, link_gb_s: float,
    source: str,
) -> DeviceSheet:  # fmt: skip
    rates = {"float32": tf32 * TERA, "bfloat16": bf16 * TERA, "int8": int8 * TERA}
    if fp8:
        rates["fp8"] = fp8 * TERA
    return DeviceSheet(name, mib * MIB, gb_s * 1e9, rates, link_gb_s * 1e9, source)


DEVICES = {
    sheet.name: sheet
    for sheet in (
        _gpu("a100-40g", 40960, 1555, 156, 312, 624, 0, 300, "NVIDIA A100 data sheet, SXM 40 GB"),
        _gpu("a100-80g", 81920, 2039, 156, 312, 624, 0, 300, "NVIDIA A100 data sheet, SXM 80 GB"),
        _gpu("h100", 81559, 3350, 494.7, 989.4, 1978.9, 1978.9, 450, "NVIDIA H100 data sheet, SXM"),
        _gpu("h200", 143771, 4800, 494.7, 989.4, 1978.9, 1978.9, 450, "NVIDIA H200 data sheet, SXM"),
        _gpu("b200", 183359, 8000, 1125, 2250, 4500, 4500, 900, "NVIDIA HGX B200 data sheet"),
        _gpu("l4", 23034, 300, 60, 121, 242, 242, 32, "NVIDIA L4 data sheet; PCIe 4.0 x16"),
        _gpu("l40s", 46068, 864, 183, 362, 733, 733, 32, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
        _gpu("a10", 23028, 600, 62.5, 125, 250, 0, 32, "NVIDIA A10 data sheet; PCIe 4.0 x16"),
        _gpu("rtx4090", 24564, 1008, 82.6, 165.2, 660.6, 330.3, 32, "NVIDIA Ada white paper; PCIe 4.0 x16"),
    )
}
"""By name."""


def device_sheet(name: str) -> DeviceSheet:
    """The sheet of a name. Raises ConfigError with the known names."""
    if name not in DEVICES:
        raise ConfigError(
            f"no sheet of a device {name!r}; known: {', '.join(DEVICES)}; 'detect' measures this machine"
        )
    return DEVICES[name]


def measured_sheet(
    name: str, bandwidth: float, matmul_rate: float, memory_bytes: int = 0, platform: str = "cpu"
) -> DeviceSheet:
    """A sheet of measured limits, bytes/s and operations/s: one rate for all dtypes, as one was measured."""
    rates = {dtype: matmul_rate for dtype in ("float32", "bfloat16", "int8")}
    return DeviceSheet(name, memory_bytes, bandwidth, rates, 1.0, "measured on this machine", platform)
