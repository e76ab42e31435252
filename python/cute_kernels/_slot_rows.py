"""How large the slots of a pool of pages are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_kernels._extension import _C


@dataclass(frozen=True)
class SlotRows:
    """Rows of a slot, those of bitmaps included: a tile's keys have at most `keys`, its values what the keys leave of
    `both`, at most `values`."""

    keys: int
    values: int
    both: int

    @classmethod
    def holding(cls, padded_head_dim: int, key_keep: int, value_keep: int) -> SlotRows:
        """For tiles that keep so many of `padded_head_dim` elements a token (0: any number).

        Streams are `keep` values long on average. How unevenly a tile's nonzeros fall on the channel classes has a
        standard deviation of `spread`; there is room for a class with a channel that every token keeps on top of that,
        in keys or values, for caches of keys have such channels. Keys and values are rarely long together. Measured:
        less than one tile in 10^4 has to be trimmed, see profiling/NOTES.md, "Pages".
        """
        keeps = key_keep, value_keep
        keys, values = (_longest_tile(padded_head_dim, keep) for keep in keeps)
        both = keys + values
        if all(keeps):
            spread = math.hypot(*(_spread(padded_head_dim, keep) for keep in keeps))
            pruned = 1 - min(keeps) / padded_head_dim
            streams = math.ceil(sum(keeps) + 7 * pruned + 4.3 * spread)
            both = min(both, 2 * _C.format.bitmap_rows(padded_head_dim) + streams)
        return cls(keys, values, both)

    def check(self, padded_head_dim: int) -> None:
        """Raises ValueError where there is no room for a value, or more than tiles can take."""
        bitmap, most = _C.format.bitmap_rows(padded_head_dim), _C.format.max_tile_rows(padded_head_dim)
        for name, rows in (("keys", self.keys), ("values", self.values)):
            if not bitmap < rows <= most:
                raise ValueError(f"rows of a slot for {name} must be from {bitmap + 1} to {most}, got {rows}")
        if not self.keys + bitmap < self.both <= self.keys + self.values:
            least, most = self.keys + bitmap + 1, self.keys + self.values
            raise ValueError(f"rows of a slot for keys and values must be from {least} to {most}, got {self.both}")


def _longest_tile(padded_head_dim: int, keep: int) -> int:
    if keep == 0:
        return _C.format.max_tile_rows(padded_head_dim)
    longest = math.ceil(keep + 7 * (1 - keep / padded_head_dim) + 3.3 * _spread(padded_head_dim, keep))
    return _C.format.bitmap_rows(padded_head_dim) + min(longest, padded_head_dim, _C.format.CLASSES * keep)


def _spread(padded_head_dim: int, keep: int) -> float:
    return math.sqrt(keep * (1 - keep / padded_head_dim) / _C.format.CLASSES)
