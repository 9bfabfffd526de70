"""The generations of NVIDIA GPUs that kernels are compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """What a kernel meets on the GPUs of one compute capability."""

    capability: tuple[int, int]
    shared: int  # bytes of shared memory that one thread block may have
    product: str
    device: str  # its name in CUDA, by which vLLM looks up tuned constants
    multiprocessors: int

    @property
    def name(self) -> str:
        return f"sm{self.capability[0]}{self.capability[1]}"

    @property
    def number(self) -> int:
        """The capability as Triton writes it: 75, 100."""
        return self.capability[0] * 10 + self.capability[1]


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
GENERATIONS = {
    each.name: each
    for each in (
        Generation((7, 0), 96 << 10, "V100", "Tesla V100-SXM2-32GB", 80),
        Generation((7, 5), 64 << 10, "T4", "Tesla T4", 40),
        Generation((8, 0), 163 << 10, "A100", "NVIDIA A100-SXM4-80GB", 108),
        Generation((8, 6), 99 << 10, "RTX 3090", "NVIDIA GeForce RTX 3090", 82),
        Generation((8, 9), 99 << 10, "L4", "NVIDIA L4", 58),
        Generation((9, 0), 227 << 10, "H100", "NVIDIA H100 80GB HBM3", 132),
        Generation((10, 0), 227 << 10, "B200", "NVIDIA B200", 148),
        Generation((12, 0), 99 << 10, "RTX 5090", "NVIDIA GeForce RTX 5090", 170),
    )
}
DEFAULT = ("sm70", "sm75", "sm80", "sm90", "sm100")
