"""How large the slots of a pool of pages are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_kernels._runtime.extension import _C, CODEC_CODES


@dataclass(frozen=True)
class SlotRows:
    """Rows of a slot, those of bitmaps included: at most `keys` for a tile's keys, and for its values what the keys
    leave of `both`, at most `values`."""

    keys: int
    values: int
    both: int

    @classmethod
    def holding(cls, padded_head_dim: int, key_keep: int, value_keep: int) -> SlotRows:
        """For tiles that keep so many of `padded_head_dim` elements a token (0: any number).

        Streams are `keep` values long on average. The number of a tile's nonzeros in a channel class has a standard
        deviation of `spread`. On top of that, a slot holds one channel a class that every token keeps, as keys have
        such channels. Keys and values are rarely long together: fewer rows than both need apart are enough. The slots
        are chosen so that less than one tile in 10^4 is trimmed (python -m profiling.pages trim; docs/notes/cache.md).
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
        """Raises ValueError for slots without a row of values, or with more rows than a tile can take."""
        bitmap, most = _C.format.bitmap_rows(padded_head_dim), _max_tile_rows(padded_head_dim)
        for name, rows in (("keys", self.keys), ("values", self.values)):
            if not bitmap < rows <= most:
                raise ValueError(f"rows of a slot for {name} must be from {bitmap + 1} to {most}, got {rows}")
        if not self.keys + bitmap < self.both <= self.keys + self.values:
            least, most = self.keys + bitmap + 1, self.keys + self.values
            raise ValueError(f"rows of a slot for keys and values must be from {least} to {most}, got {self.both}")


def _max_tile_rows(padded_head_dim: int) -> int:
    return _C.format.max_tile_rows(padded_head_dim, CODEC_CODES["fp16"])  # all codecs of pools have 16 bits a value


def _longest_tile(padded_head_dim: int, keep: int) -> int:
    if keep == 0:
        return _max_tile_rows(padded_head_dim)
    longest = math.ceil(keep + 7 * (1 - keep / padded_head_dim) + 3.3 * _spread(padded_head_dim, keep))
    return _C.format.bitmap_rows(padded_head_dim) + min(longest, padded_head_dim, _C.format.CLASSES * keep)


def _spread(padded_head_dim: int, keep: int) -> float:
    return math.sqrt(keep * (1 - keep / padded_head_dim) / _C.format.CLASSES)
