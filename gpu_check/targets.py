"""The GPUs that programs are compiled for, as facts of their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  threads_per_core_limit: {threads_per_core}
  core_count: {cores}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "{kind}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""
"""A GpuTargetConfigProto, as XLA reads it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU. `kind` is JAX's device_kind; `accelerated` says that the architecture-specific instructions are
    used (sm_90a: wgmma, TMA). Bytes of shared memory: all that a multiprocessor has, and the most of one
    block. `bandwidth` in bytes per second."""

    name: str
    kind: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """As ptxas wants it: sm_90a."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.accelerated else ''}"

    @property
    def text(self) -> str:
        major, minor = self.capability
        return _TEXT.format(
            shared_per_core=self.shared_per_core, threads_per_core=self.threads_per_core, cores=self.cores,
            fpus_per_core=self.fpus_per_core, bandwidth=self.bandwidth, l2_bytes=self.l2_bytes,
            clock_ghz=self.clock_ghz, memory_bytes=self.memory_bytes,
            shared_per_block=self.shared_per_block, major=major, minor=minor, kind=self.kind,
            extension="ACCELERATED_FEATURES" if self.accelerated else "NONE",
        )  # fmt: skip


H200 = Target(
    "h200", "NVIDIA H200", (9, 0), accelerated=True, cores=132, fpus_per_core=128, threads_per_core=2048,
    shared_per_core=233472, shared_per_block=232448, bandwidth=4_800_000_000_000, l2_bytes=50 << 20,
    clock_ghz=1.98, memory_bytes=151397597184,
)  # fmt: skip
A100 = Target(
    "a100", "NVIDIA A100-SXM4-80GB", (8, 0), accelerated=False, cores=108, fpus_per_core=64,
    threads_per_core=2048, shared_per_core=167936, shared_per_block=166912, bandwidth=2_039_040_000_000,
    l2_bytes=40 << 20, clock_ghz=1.41, memory_bytes=85100068864,
)  # fmt: skip
L4 = Target(
    "l4", "NVIDIA L4", (8, 9), accelerated=False, cores=58, fpus_per_core=128, threads_per_core=1536,
    shared_per_core=102400, shared_per_block=101376, bandwidth=300_000_000_000, l2_bytes=48 << 20,
    clock_ghz=2.04, memory_bytes=23689289728,
)  # fmt: skip
B200 = Target(
    "b200", "NVIDIA B200", (10, 0), accelerated=True, cores=148, fpus_per_core=128, threads_per_core=2048,
    shared_per_core=233472, shared_per_block=232448, bandwidth=7_672_320_000_000, l2_bytes=132644864,
    clock_ghz=1.965, memory_bytes=191514411008,
)  # fmt: skip
RTX_PRO_6000 = Target(
    "rtx6000pro", "NVIDIA RTX PRO 6000 Blackwell", (12, 0), accelerated=True, cores=188, fpus_per_core=128,
    threads_per_core=1536, shared_per_core=131072, shared_per_block=101376, bandwidth=1_792_000_000_000,
    l2_bytes=128 << 20, clock_ghz=2.6, memory_bytes=103079215104,
)  # fmt: skip

TARGETS = {target.name: target for target in (H200, A100, L4, B200, RTX_PRO_6000)}
CHECKED = ("h200", "a100", "l4", "b200")
"""What `make check-gpu` compiles for."""
