"""What devices can do, a clock and SM unless a field says otherwise, and who says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

SOURCES = {
    "registers, shared memory": "CUDA C++ Programming Guide, technical specifications by compute capability",
    "issue, ALU, POPC": "the same guide, throughput of native arithmetic instructions: 4 schedulers, 64 and 16 lanes",
    "FMA-heavy (IDP)": "64 lanes, the rate of integer multiply-add in that table; decode_microbench agrees",
    "SMs, clocks, tensor, DRAM": "A100 and H100 whitepapers, H200 datasheet; tensor = fp16 peak / SMs / clock / 2",
    "mma.sync on 9.0": "about 63 % of the WGMMA peak, Luo et al., arXiv 2402.13499",
    "L2 bytes a clock": "5120 for the device: A100 whitepaper; for H100 table 3 of PMC10448217, 8986 GB/s at 1755 MHz",
    "DRAM achieved": "a copy on an H200: 4.28 of 4.8 TB/s, profiling/NOTES.md; taken for all",
    "latencies": "under load, assumed: twice and three times the idle 281 (L2) and 690 (DRAM) clocks of a GH200, "
    "github.com/markdewing/AI_kernels, latency/README.md",
}


@dataclass(frozen=True)
class Device:
    """One kind of GPU. Clocks are SM clocks."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_mhz: float  # the fastest
    tensor_clock_mhz: float  # that the tensor peak is quoted at
    shared_bytes: int  # of a CTA, opt-in
    l2_bytes: int  # of the device
    dram_tb_per_s: float  # peak, of the device
    tensor_fma: int  # dense fp16
    mma_sync_fma: int  # dense fp16 through mma.sync
    registers: int = 65536
    registers_a_thread: int = 255
    shared_bytes_a_clock: int = 128
    l2_bytes_a_clock: int = 5120  # of the device
    issue: int = 4  # warp instructions
    alu_lanes: int = 64
    fma_heavy_lanes: int = 64
    popc_lanes: int = 16
    dram_achieved: float = 0.89
    l2_latency: int = 560  # clocks, loaded
    dram_latency: int = 2000  # clocks, loaded

    @property
    def dram_bytes_a_clock(self) -> float:
        """Achieved, an SM's share at the fastest clock."""
        return self.dram_tb_per_s * self.dram_achieved * 1e6 / self.clock_mhz / self.multiprocessors

    @property
    def is_hopper(self) -> bool:
        return self.capability[0] == 9

    @property
    def slug(self) -> str:
        """Its folder in profiling/results."""
        return f"nvidia-{self.name.lower()}"


_A100 = Device("A100", (8, 0), 108, 1410, 1410, 166912, 40 << 20, 2.039, 1024, 1024)
_H100 = Device("H100", (9, 0), 132, 1980, 1830, 232448, 50 << 20, 3.352, 2048, 1288)
DEVICES = {device.name: device for device in (_A100, _H100, replace(_H100, name="H200", dram_tb_per_s=4.8))}


class UnknownDevice(ValueError):
    """No such device; the message lists those there are."""


def find(name: str) -> Device:
    """A device by its name, upper or lower case, or "attached": the current CUDA device.

    Raises:
        UnknownDevice: there is none of that name, or none attached whose rates are known.
    """
    if name.lower() == "attached":
        return attached()
    for known, device in DEVICES.items():
        if name.lower() in (known.lower(), device.slug):
            return device
    raise UnknownDevice(f"no device '{name}'; there are {', '.join(DEVICES)} and attached")


def attached() -> Device:
    """The current CUDA device: what torch and the driver tell, the rest from the built-in device of its generation.

    Raises:
        UnknownDevice: torch sees no device, or its compute capability is not one of the built-in devices'.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnknownDevice("no CUDA device is attached; name one: " + ", ".join(DEVICES))
    from profiling.environment import environment

    index = torch.cuda.current_device()
    return from_properties(torch.cuda.get_device_properties(index), environment(torch.device("cuda", index)).clock_mhz)


def from_properties(properties: object, clock_mhz: float | None) -> Device:
    """A device from torch's properties and its fastest SM clock."""
    capability = (properties.major, properties.minor)
    named = [d for d in DEVICES.values() if d.name in properties.name]
    alike = named or [d for d in DEVICES.values() if d.capability == capability]
    if not alike:
        raise UnknownDevice(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, whose rates "
            f"are not known; there are {', '.join(DEVICES)}"
        )
    base = alike[0]
    clock = clock_mhz or base.clock_mhz
    memory_clock_khz, bus_bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    tb_per_s = 2 * memory_clock_khz * 1e3 * bus_bits / 8 / 1e12  # two transfers a clock
    return replace(
        base,
        name=base.name if named else properties.name,
        multiprocessors=properties.multi_processor_count,
        clock_mhz=clock,
        tensor_clock_mhz=min(clock, base.tensor_clock_mhz),
        l2_bytes=getattr(properties, "L2_cache_size", 0) or base.l2_bytes,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or base.shared_bytes,
        dram_tb_per_s=tb_per_s or base.dram_tb_per_s,
    )


def describe(device: Device) -> list[str]:
    """Lines for --list-devices."""
    return [
        (
            f"{device.name}: compute capability {device.capability[0]}.{device.capability[1]}, "
            f"{device.multiprocessors} SMs, {device.clock_mhz:g} MHz ({device.tensor_clock_mhz:g} at the tensor peak)"
        ),
        (
            f"  an SM: {device.registers} registers, {device.shared_bytes} bytes of shared memory a CTA; a clock: "
            f"{device.issue} warp instructions, {device.alu_lanes} ALU, {device.fma_heavy_lanes} FMA-heavy and "
            f"{device.popc_lanes} POPC lanes, {device.shared_bytes_a_clock} bytes of shared memory, "
            f"{device.tensor_fma} fp16 tensor FMA ({device.mma_sync_fma} by mma.sync)"
        ),
        (
            f"  memory: {device.dram_tb_per_s:g} TB/s, of which {device.dram_achieved:.0%} are reached = "
            f"{device.dram_bytes_a_clock:.1f} bytes a clock and SM; L2 {device.l2_bytes >> 20} MiB, "
            f"{device.l2_bytes_a_clock} bytes a clock; latency {device.dram_latency} and {device.l2_latency} clocks"
        ),
    ]
