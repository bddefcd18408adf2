"""How ranks are arranged: the product of the data, tensor, pipeline and sequence parallel degrees."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees and the ZeRO stage; their product is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    sp: int = 1
    zero_stage: int = 0

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.sp

    def as_dict(self) -> dict[str, int]:
        """The `layout` object of the command line's JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch identity: global = micro x gradient accumulation steps x data parallel degree."""

    micro: int
    accumulation: int
    dp: int

    @property
    def total(self) -> int:
        """Samples in one optimizer step."""
        return self.micro * self.accumulation * self.dp
