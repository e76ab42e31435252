// Dense rows as a codec stores them.
#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/cpu/parallel.hpp"

namespace cute_kernels::cpu {
namespace {

constexpr int64_t kTokensPerTask = 512;

template <class Codec>
void quantize_row(uint16_t const* x, int head_dim, DType dtype, uint16_t* out) {
  for (int c = 0; c < head_dim; ++c) {
    uint32_t const stored = Codec::encode(x[c], dtype);
    out[c] = Codec::is_zero(stored) ? uint16_t{0} : Codec::decode(stored, dtype);
  }
}

}  // namespace

void quantize(DenseView const& x, format::CodecId id, uint16_t* out, int threads) {
  format::visit_codec(id, [&](auto codec) {
    using Codec = decltype(codec);
    format::check_codec(id, x.dtype);
    int64_t const rows = int64_t{x.batch} * x.kv_heads * x.tokens;
    parallel(threads, (rows + kTokensPerTask - 1) / kTokensPerTask, [&](TaskQueue& queue) {
      for (int64_t task; (task = queue.next()) >= 0;)
        for (int64_t row = task * kTokensPerTask; row < std::min((task + 1) * kTokensPerTask, rows); ++row)
          quantize_row<Codec>(x.row(row / x.tokens, row % x.tokens), x.head_dim, x.dtype, out + row * x.head_dim);
    });
  });
}

}  // namespace cute_kernels::cpu
