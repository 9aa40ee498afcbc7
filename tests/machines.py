"""Machines for tests of rules: Macs, CPUs and CUDA cards."""

from m1clip.hardware.machine_info import MachineInfo


def mac(chip: str, cores: int = 8, fast: int = 4) -> MachineInfo:
    return MachineInfo(
        system="Darwin",
        machine="arm64",
        cpu=chip,
        cores=cores,
        performance_cores=fast,
        memory_bytes=16 * 2**30,
        mps=True,
        torch="2.13.0",
    )


def linux(
    cpu: str, cores: int, card: str | None = None, capability: tuple[int, int] = (0, 0)
) -> MachineInfo:
    return MachineInfo(
        system="Linux",
        machine="x86_64",
        cpu=cpu,
        cores=cores,
        performance_cores=cores,
        memory_bytes=64 * 2**30,
        cuda=card,
        cuda_capability=capability,
        torch="2.13.0",
    )


M1, M4 = mac("Apple M1"), mac("Apple M4", 10, 4)
XEON = linux("Intel(R) Xeon(R) Platinum 8481C", 16)
PASCAL = linux("Intel(R) Core(TM) i7-7700", 4, "GeForce GTX 1080", (6, 1))
TURING = linux("AMD Ryzen 5 3600", 6, "Tesla T4", (7, 5))
H200 = linux("Intel(R) Xeon(R) Platinum 8558", 48, "NVIDIA H200", (9, 0))


def product_is_wrong(reduction: int, sides: tuple[int, int]) -> bool:
    """Whether MPS computes a matmul wrong, on M1 and M2: a narrow output takes another kernel."""
    return reduction >= 32_767 and min(sides) >= 16
