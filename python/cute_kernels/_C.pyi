"""The extension module; written by `make stubs`. Pointers are integers, 0 is null."""

from collections.abc import Sequence

def build_info() -> dict: ...

ARCHITECTURES: dict[str, dict[str, object]]

BACKENDS: dict[str, dict[str, str]]

def backend_status(backend: str, major: int, minor: int, archs: str = ...) -> str: ...
def build_status(major: int, minor: int, archs: str = ...) -> str: ...
def automatic_backend(major: int, minor: int) -> str: ...

class format:
    ROLES: dict[str, int]
    DTYPES: dict[str, int]
    CODECS: dict[str, int]
    TILE_FORMATS: dict[str, int]
    TILE_TOKENS: int
    LANES: int
    ROW_BYTES: int
    WORD_ELEMENTS: int
    CLASSES: int
    VALUE_STREAMS: int
    NO_NONZEROS_SCALE: int
    HEAD_DIMS: list[int]
    @staticmethod
    def padded_head_dim(head_dim: int) -> int: ...
    @staticmethod
    def bitmap_rows(padded_head_dim: int) -> int: ...
    @staticmethod
    def max_tile_rows(padded_head_dim: int, codec: int, tile_format: int = ...) -> int: ...
    @staticmethod
    def scale_row(padded_head_dim: int, tile_format: int) -> int: ...
    @staticmethod
    def own_codec(dtype: int) -> int: ...
    @staticmethod
    def stores(codec: int, dtype: int) -> bool: ...
    @staticmethod
    def value_bits(codec: int) -> int: ...
    @staticmethod
    def scale_rows(codec: int) -> int: ...
    @staticmethod
    def value_rows(longest: int, codec: int, tile_format: int = ...) -> int: ...
    @staticmethod
    def value_streams(codec: int, tile_format: int) -> int: ...
    @staticmethod
    def number_table(codec: int) -> list[float]: ...
    @staticmethod
    def codes(codec: int) -> list[bool]: ...
    @staticmethod
    def has_nan(codec: int) -> bool: ...
    @staticmethod
    def scale_index(token_position: int) -> int: ...
    MAX_SCALE_LOG2: int
    MAX_CHANNEL_SCALE_LOG2: int
    @staticmethod
    def bitmap_bit(element: int, codec: int) -> int: ...
    @staticmethod
    def element_table(role: int, padded_head_dim: int) -> list[int]: ...
    @staticmethod
    def two_of_four_rows(padded_head_dim: int, codec: int) -> int: ...
    @staticmethod
    def two_of_four_groups(role: int, padded_head_dim: int) -> list[list[int]]: ...
    @staticmethod
    def two_of_four_place(group: int, index: int, codec: int) -> tuple[int, int]: ...
    @staticmethod
    def slot_place(group: int, index: int, codec: int) -> list[int]: ...
    @staticmethod
    def stream_of(role: int, token_group: int, channel_class: int) -> tuple[int, int]: ...

class SparseView:
    def __init__(
        self,
        blocks: int,
        row_offsets: int,
        token_order: int,
        channel_order: int,
        channel_scale: int,
        role: int,
        dtype: int,
        codec: int,
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        max_tile_rows: int,
        tile_format: int = ...,
    ) -> None: ...
    @staticmethod
    def paged(
        blocks: int,
        tile_rows: int,
        token_order: int,
        channel_order: int,
        channel_scale: int,
        role: int,
        dtype: int,
        codec: int,
        sequences: int,
        kv_heads: int,
        head_dim: int,
        max_tile_rows: int,
        page_table: int,
        pages_per_sequence: int,
        tiles_per_page: int,
        slot_rows: int,
        pages: int,
        rows_before: int,
        shares_orders: bool = ...,
        tile_format: int = ...,
    ) -> SparseView: ...

class Pool:
    def __init__(
        self,
        keys: SparseView,
        values: SparseView,
        key_keep: int,
        value_keep: int,
        dropped: int,
        refused: int,
        error: int,
    ) -> None: ...

class cpu:
    @staticmethod
    def isa() -> str: ...
    @staticmethod
    def select(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        keep: int,
        masks: int,
        counts: int,
        pruned: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def select_two_of_four(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        role: int,
        channel_order: int,
        keep: int,
        masks: int,
        threads: int,
    ) -> int: ...
    @staticmethod
    def channel_scales(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        scales: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def token_scales(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        masks: int,
        codec: int,
        channel_scales: int,
        scales: int,
        threads: int,
    ) -> int: ...
    @staticmethod
    def balance(
        masks: int,
        channel_order: int,
        masks2: int,
        channel_order2: int,
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        token_order: int,
        longest: int,
        longest2: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def order_slots(
        key_masks: int,
        key_codec: int,
        key_channels: int,
        key_longest: int,
        value_masks: int,
        value_codec: int,
        value_channels: int,
        value_longest: int,
        heads: int,
        tokens: int,
        head_dim: int,
        token_order: int,
        threads: int,
    ) -> tuple[int, int]: ...
    @staticmethod
    def pack(x: int, strides: Sequence[int], masks: int, token_scales: int, view: SparseView, threads: int) -> None: ...
    @staticmethod
    def pack_slots(
        x: int,
        strides: Sequence[int],
        masks: int,
        token_scales: int,
        view: SparseView,
        tile_rows: int,
        dropped: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def decompress(view: SparseView, out: int, threads: int) -> None: ...
    @staticmethod
    def store(
        pool: Pool,
        k: int,
        k_strides: Sequence[int],
        v: int,
        v_strides: Sequence[int],
        batch: int,
        tokens: int,
        sequences: int,
        first_tiles: int,
        new_order: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def load(pool: Pool, sequence: int, first_tile: int, tiles: int, keys: int, values: int, threads: int) -> None: ...
    @staticmethod
    def sparse_qk(
        view: SparseView,
        q: int,
        q_strides: Sequence[int],
        q_heads: int,
        q_tokens: int,
        scale: float,
        out: int,
        out_dtype: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def sparse_av(
        view: SparseView,
        p: int,
        p_strides: Sequence[int],
        p_dtype: int,
        q_heads: int,
        q_tokens: int,
        out: int,
        threads: int,
    ) -> None: ...
    @staticmethod
    def attention(
        problem: AttentionProblem,
        q: int,
        sequences: int,
        lengths: int,
        query_starts: int,
        out: int,
        lse: int,
        threads: int,
    ) -> None: ...

class Window:
    def __init__(
        self,
        keys: int,
        values: int,
        key_strides: Sequence[int],
        value_strides: Sequence[int],
        tokens: int,
        lengths: int,
    ) -> None: ...

class AttentionProblem:
    def __init__(
        self,
        keys: SparseView,
        values: SparseView,
        window: Window | None,
        q_shape: Sequence[int],
        q_strides: Sequence[int],
        scale: float,
        causal: bool,
        num_splits: int,
        expected: tuple[int, int],
        packed_tokens: int,
    ) -> None: ...

class cuda:
    @staticmethod
    def select(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        keep: int,
        masks: int,
        counts: int,
        pruned: int,
        codec: int,
        channel_scales: int,
        token_scales: int,
        refused: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def channel_scales(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        scales: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def balance(
        masks: int,
        channel_order: int,
        masks2: int,
        channel_order2: int,
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        token_order: int,
        longest: int,
        longest2: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def deal(
        counts: int,
        heads: int,
        head_dim: int,
        grouped: bool,
        channel_order: int,
        from_scale: int,
        to_scale: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def offsets(
        longest: int,
        tiles: int,
        counts: int,
        heads: int,
        head_dim: int,
        codec: int,
        tile_format: int,
        row_offsets: int,
        totals: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def pack(
        x: int,
        strides: Sequence[int],
        masks: int,
        token_scales: int,
        keep: int,
        totals: int,
        capacity: int,
        view: SparseView,
        stream: int,
    ) -> None: ...
    @staticmethod
    def pack_two_of_four(
        x: int, strides: Sequence[int], totals: int, counts_lost: bool, view: SparseView, stream: int
    ) -> None: ...
    @staticmethod
    def slot_scratch(role: int, head_dim: int) -> tuple[int, int]: ...
    @staticmethod
    def select_slots(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        role: int,
        codec: int,
        keep: int,
        channel_order: int,
        masks: int,
        counts: int,
        totals: int,
        constrained: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def select_two_of_four(
        x: int,
        strides: Sequence[int],
        batch: int,
        kv_heads: int,
        tokens: int,
        head_dim: int,
        dtype: int,
        role: int,
        channel_order: int,
        keep: int,
        masks: int,
        counts: int,
        codec: int,
        channel_scales: int,
        token_scales: int,
        refused: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def order_slots(
        key_counts: int,
        key_codec: int,
        key_longest: int,
        value_counts: int,
        value_codec: int,
        value_longest: int,
        tiles: int,
        token_order: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def pack_slots(
        x: int,
        strides: Sequence[int],
        masks: int,
        totals: int,
        capacity: int,
        view: SparseView,
        tile_rows: int,
        dropped: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def decompress(view: SparseView, out: int, stream: int) -> None: ...
    class Windows:
        def __init__(
            self,
            keys: int,
            values: int,
            lengths: int,
            arrivals: int,
            capacity: int,
            recent: int,
            stores_full: bool,
            prepared: int = ...,
            preparation: int = ...,
        ) -> None: ...

    @staticmethod
    def preparation_bytes(padded_head_dim: int) -> int: ...
    @staticmethod
    def store_scratch_bytes(pool: Pool, batch: int, part: int) -> int: ...
    @staticmethod
    def store(
        pool: Pool,
        k: int,
        k_strides: Sequence[int],
        v: int,
        v_strides: Sequence[int],
        batch: int,
        tokens: int,
        sequences: int,
        first_tiles: int,
        new_order: int,
        part: int,
        scratch: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def append(
        pool: Pool,
        windows: cuda.Windows,
        lengths: int,
        k: int,
        k_strides: Sequence[int],
        v: int,
        v_strides: Sequence[int],
        batch: int,
        tokens: int,
        sequences: int,
        own_lengths: int,
        rank: int,
        ranks: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def load(pool: Pool, sequence: int, first_tile: int, tiles: int, keys: int, values: int, stream: int) -> None: ...
    @staticmethod
    def sparse_qk(
        view: SparseView,
        q: int,
        q_strides: Sequence[int],
        q_heads: int,
        q_tokens: int,
        scale: float,
        out: int,
        out_dtype: int,
        backend: str,
        stages_ahead: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def sparse_av(
        view: SparseView,
        p: int,
        p_strides: Sequence[int],
        p_dtype: int,
        q_heads: int,
        q_tokens: int,
        out: int,
        new_empty: object,
        backend: str,
        stages_ahead: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def merge_states(
        outs: int,
        lses: int,
        out_stride: int,
        lse_stride: int,
        out: int,
        lse: int,
        states: int,
        rows: int,
        head_dim: int,
        dtype: int,
        stream: int,
    ) -> None: ...
    @staticmethod
    def has_prefill_kernel(codec: int, tile_format: int) -> bool: ...
    @staticmethod
    def attention(
        problem: AttentionProblem,
        q: int,
        sequences: int,
        lengths: int,
        query_starts: int,
        out: int,
        lse: int,
        new_empty: object,
        backend: str,
        stages_ahead: int,
        stream: int,
    ) -> None: ...
    class DecodingStep:
        def __init__(
            self,
            pool: Pool,
            windows: cuda.Windows,
            problem: AttentionProblem,
            lengths: int,
            k_strides: Sequence[int],
            v_strides: Sequence[int],
            batch: int,
            tokens: int,
            backend: str,
        ) -> None: ...
        def run(self, k: int, v: int, q: int, out: int, new_empty: object, stream: int) -> None: ...
