"""GPUs and their networks, as their makers' data sheets have them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """`flops`: dense bf16 per second; `memory_bandwidth`, `link`, `network`: bytes per second of one GPU.

    `link` is NVLink in one direction, `network` the share of a GPU in a node's InfiniBand; a node has `per_node`.
    """

    name: str
    memory: float
    flops: float
    memory_bandwidth: float
    link: float
    network: float
    source: str
    per_node: int = 8

    def collective(self, ranks: int) -> float:
        """Bytes per second of a ring of `ranks`: each byte enters a node once, over the network of all of its GPUs."""
        return self.link if ranks <= self.per_node else min(self.link, self.per_node * self.network)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 312e12, 2.039e12, 300e9, 25e9, "data sheets of A100 80GB SXM and DGX A100 (8 x 200 Gb/s)"),
        Gpu("h100", 80e9, 989e12, 3.35e12, 450e9, 50e9, "data sheets of H100 SXM and DGX H100 (8 x 400 Gb/s)"),
        Gpu("h200", 141e9, 989e12, 4.8e12, 450e9, 50e9, "data sheets of H200 SXM and DGX H200 (8 x 400 Gb/s)"),
    )
}
