"""How large the slots of a pool of pages are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_kernels._runtime.extension import _C, CODEC_IDS, TILE_FORMATS
from cute_kernels._storage.steps import rows_before_values
from cute_kernels._storage.storage import BITMAP, TWO_OF_FOUR_BITMAP


@dataclass(frozen=True)
class SlotRows:
    """Rows of a slot, those of bitmaps included: at most `keys` for a tile's keys, and for its values what the keys
    leave of `both`, at most `values`."""

    keys: int
    values: int
    both: int

    @classmethod
    def holding(
        cls, padded_head_dim: int, key_keep: int, value_keep: int, key_codec: str = "fp16", value_codec: str = "fp16"
    ) -> SlotRows:
        """For tiles that keep so many of `padded_head_dim` elements a token (0: any number).

        Streams are `keep` values long on average. The number of a tile's nonzeros in a channel class has a standard
        deviation of `spread`. On top of that, a slot holds one channel a class that every token keeps, as keys have
        such channels. Keys and values are rarely long together: fewer rows than both need apart are enough. The slots
        are chosen so that less than one tile in 10^4 is trimmed (python -m profiling.pages trim; docs/notes/cache.md).
        """
        keeps, codecs = (key_keep, value_keep), (key_codec, value_codec)
        keys, values = (_longest_tile(padded_head_dim, keep, codec) for keep, codec in zip(keeps, codecs))
        both = keys + values
        if all(keeps):
            rates = [_rows_of_value(codec) for codec in codecs]
            spread = math.hypot(*(rate * _spread(padded_head_dim, keep) for rate, keep in zip(rates, keeps)))
            pruned = 1 - min(keeps) / padded_head_dim
            mean = sum(rate * (keep + 3.5 * pruned) for rate, keep in zip(rates, keeps))
            rows = math.ceil(mean + 4.3 * spread) + sum(_least_rows(codec) - 1 for codec in codecs)
            both = min(both, sum(rows_before_values(padded_head_dim, codec) for codec in codecs) + rows)
        return cls(keys, values, both)

    @classmethod
    def of_pairs(cls, padded_head_dim: int, key_codec: str, value_codec: str) -> SlotRows:
        """For tiles of the format of exactly two of four, which have one size."""
        keys, values = (
            _C.format.two_of_four_rows(padded_head_dim, CODEC_IDS[codec]) for codec in (key_codec, value_codec)
        )
        return cls(keys, values, keys + values)

    @classmethod
    def of_slots(
        cls, padded_head_dim: int, key_keep: int, value_keep: int, key_codec: str, value_codec: str
    ) -> SlotRows:
        """For tiles of the format of at most two of four, of narrow codecs. A lane's stream has 2 `keep` values on
        average. Token orders leave the longest stream of keys about one standard deviation above that, and that of
        values 1.6, for their tokens move in fours."""
        keeps, codecs = (key_keep, value_keep), (key_codec, value_codec)
        bounds = [_slot_stream(padded_head_dim, keep) for keep in keeps]
        keys, values = (_slot_rows(padded_head_dim, codec, sum(bound)) for bound, codec in zip(bounds, codecs))
        means = [_slot_rows(padded_head_dim, codec, mean) for (mean, _), codec in zip(bounds, codecs)]
        spare = 0.6 * math.hypot(keys - means[0], values - means[1])  # keys and values are rarely long together
        return cls(keys, values, min(keys + values, sum(means) + math.ceil(spare)))

    def check(self, padded_head_dim: int, key_codec: str, value_codec: str, tile_format: str = BITMAP) -> None:
        """Raises ValueError for slots without a row of values, or with more rows than a tile can take."""
        before = {}
        for name, rows, codec in (("keys", self.keys, key_codec), ("values", self.values, value_codec)):
            before[name] = rows_before_values(padded_head_dim, codec, tile_format)
            most = _C.format.max_tile_rows(padded_head_dim, CODEC_IDS[codec], TILE_FORMATS[tile_format])
            if not before[name] < rows <= most:
                raise ValueError(f"rows of a slot for {name} must be from {before[name] + 1} to {most}, got {rows}")
        least, most = self.keys + before["values"] + 1, self.keys + self.values
        if not least <= self.both <= most:
            raise ValueError(f"rows of a slot for keys and values must be from {least} to {most}, got {self.both}")


def _slot_stream(padded_head_dim: int, keep: int) -> tuple[float, float]:
    """Of the longest stream of a lane's slots: what tiles have on average, and what few have more."""
    share = keep / padded_head_dim
    spread = math.sqrt(2 * keep * (1 - 2 * share))
    return 2 * keep + 1.3 * spread, 2.5 * spread + 5 * (1 - share)


def _slot_rows(padded_head_dim: int, codec: str, longest: float) -> int:
    values = min(math.ceil(longest), padded_head_dim)
    before = rows_before_values(padded_head_dim, codec, TWO_OF_FOUR_BITMAP)
    return before + _C.format.value_rows(values, CODEC_IDS[codec], TILE_FORMATS[TWO_OF_FOUR_BITMAP])


def _max_tile_rows(padded_head_dim: int, codec: str) -> int:
    return _C.format.max_tile_rows(padded_head_dim, CODEC_IDS[codec])


def _least_rows(codec: str) -> int:
    """Of value rows: those that a stream of one value takes."""
    return _C.format.value_rows(1, CODEC_IDS[codec])


def _rows_of_value(codec: str) -> float:
    """Value rows that a value of the longest stream takes, the rounding to whole words apart."""
    many = 64
    return _C.format.value_rows(many, CODEC_IDS[codec]) / many


def _longest_tile(padded_head_dim: int, keep: int, codec: str) -> int:
    if keep == 0:
        return _max_tile_rows(padded_head_dim, codec)
    longest = math.ceil(keep + 7 * (1 - keep / padded_head_dim) + 3.3 * _spread(padded_head_dim, keep))
    longest = min(longest, padded_head_dim, _C.format.CLASSES * keep)
    return rows_before_values(padded_head_dim, codec) + _C.format.value_rows(longest, CODEC_IDS[codec])


def _spread(padded_head_dim: int, keep: int) -> float:
    return math.sqrt(keep * (1 - keep / padded_head_dim) / _C.format.CLASSES)
