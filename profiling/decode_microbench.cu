// How fast can compressed fp16 that already lies in shared memory become tensor-core A fragments?
//
// One CTA on every SM; each of its warps decodes the CTA's blocks in turn and feeds the fragments to mma.m16n8k16.
// No global memory is read inside the loop, so the rate is the decoder's limit: compare it with what memory can feed
// (bytes per clock and SM x 8 / bits per element).
//
// A scheme says how a lane's 64 elements lie in its warp's block and how the lane turns them into 32 half2 registers:
//
//   struct Scheme {
//     static constexpr char const* kName;
//     static constexpr int kMaxRows;                                // of a block; a row is 32 words, one a lane
//     static constexpr int kRowsBehind;                             // of a block, that decoding may read
//     static uint16_t value(uint32_t random);                       // host; bits of a half, not zero, that can be stored
//     static int pack(LaneElements const&, LaneColumn<kMaxRows>&);  // host; returns the rows that the lane needs
//     static __device__ void decode(uint32_t column, Fragments&);   // column: shared address of the lane's first word
//   };
//
// To measure another one, write that struct and add it to `main`. `python -m profiling.decode_microbench` builds and
// runs this file. Output is CSV; the exit status is 1 if a scheme decoded anything wrong, 2 without a usable GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/mma/decoder.hpp"

namespace cute_kernels::profiling {

using namespace cute;
using format::BitmapTile;
using format::Fp16Codec;
using format::kLanes;
using format::kRowBytes;

constexpr int kLaneElements = 64;              // two bitmap words
constexpr int kRegisters = kLaneElements / 2;  // half2 registers of a lane
constexpr int kAtomRegisters = 4;              // of one m16n8k16 A fragment
constexpr int kPatterns = 8;                   // different blocks; warp w decodes block w % kPatterns
constexpr int kIterations = 4000;

using LaneElements = std::array<uint16_t, kLaneElements>;  // bits of the halves; 0 is an absent element
template <int kRows>
using LaneColumn = std::array<uint32_t, kRows>;                        // a lane's word of every row
using Fragments = decltype(make_tensor<uint32_t>(Int<kRegisters>{}));  // register i: elements 2i (low half), 2i + 1

// ---- Schemes -------------------------------------------------------------------------------------------------------

// The project's format and decoder: bitmap rows, then value rows whose low and high halves are two streams, in turn two
// registers of the one and two of the other.
struct SplitStreams {
  static constexpr char const* kName = "split streams";
  static constexpr int kBitmapRows = kLaneElements / BitmapTile::kWordElements;
  static constexpr int kMaxRows = kBitmapRows + kLaneElements / BitmapTile::kStreams;
  static constexpr int kRowsBehind = mma::Decoder<BitmapTile, Fp16Codec>::kRowsBehind;

  static uint16_t value(uint32_t random) { return 0x3c00 | (random & 0x3ff); }  // in [1, 2)

  static int pack(LaneElements const& elements, LaneColumn<kMaxRows>& column) {
    int length[BitmapTile::kStreams] = {};
    for (int e = 0; e < kLaneElements; ++e) {  // in the order of the streams
      uint16_t value = elements[e / 8 * 8 + BitmapTile::ElementOrder{}(e % 8)];
      if (value == 0) continue;
      int stream = BitmapTile::stream(e), rank = length[stream]++;
      column[BitmapTile::bitmap_word(e)] |= 1u << BitmapTile::bitmap_bit(e % BitmapTile::kWordElements);
      column[kBitmapRows + rank] |= Fp16Codec::place(value, stream, rank);
    }
    return kBitmapRows + *std::max_element(std::begin(length), std::end(length));
  }

  static __device__ void decode(uint32_t column, Fragments& fragments) {
    uint32_t word0 = ptx::load_shared_u32(column);
    uint32_t word1 = ptx::load_shared_u32(column + kRowBytes);
    uint32_t above_values = column + (kBitmapRows - 1) * kRowBytes;
    using Decoder = mma::Decoder<BitmapTile, Fp16Codec>;
    typename Decoder::Cursor at{above_values, above_values + 2};
    Decoder::decode64(word0, word1, at, fragments);
  }
};

// The same of a narrow codec: numbers of its codes.
template <class Codec>
struct NarrowStreams {
  static constexpr char const* kName = Codec::kName;
  static constexpr int kBitmapRows = kLaneElements / BitmapTile::kWordElements;
  static constexpr int kMaxRows = kBitmapRows + Codec::value_rows(kLaneElements / BitmapTile::kStreams);
  static constexpr int kRowsBehind = mma::Decoder<BitmapTile, Codec>::kRowsBehind;

  static uint16_t value(uint32_t random) {
    return half_t(1 + static_cast<float>(random % static_cast<uint32_t>(cute::min(Codec::kLargest, 15.f)))).raw();
  }

  static int pack(LaneElements const& elements, LaneColumn<kMaxRows>& column) {
    int length[BitmapTile::kStreams] = {};
    for (int e = 0; e < kLaneElements; ++e) {  // in the order of the streams
      uint16_t value = elements[e / 8 * 8 + BitmapTile::ElementOrder{}(e % 8)];
      if (value == 0) continue;
      int stream = BitmapTile::stream(e), rank = length[stream]++;
      int bit = BitmapTile::bitmap_bit<Codec::kBitDistance>(e % BitmapTile::kWordElements);
      column[BitmapTile::bitmap_word(e)] |= 1u << bit;
      uint32_t code = Codec::encode(static_cast<float>(half_t::bitcast(value)));
      column[kBitmapRows + Codec::value_row(stream, rank)] |= Codec::place(code, stream, rank);
    }
    return kBitmapRows + Codec::value_rows(*std::max_element(std::begin(length), std::end(length)));
  }

  static __device__ void decode(uint32_t column, Fragments& fragments) {
    uint32_t word0 = ptx::load_shared_u32(column);
    uint32_t word1 = ptx::load_shared_u32(column + kRowBytes);
    using Decoder = mma::Decoder<BitmapTile, Codec>;
    typename Decoder::Cursor at{column + kBitmapRows * kRowBytes, {0, 0}};
    Decoder::decode64(word0, word1, at, fragments);
  }
};

// Nothing to decode: what the loop and its MMAs cost, and the rate that no scheme can exceed here.
struct Dense {
  static constexpr char const* kName = "dense";
  static constexpr int kMaxRows = kRegisters, kRowsBehind = 0;

  static uint16_t value(uint32_t random) { return SplitStreams::value(random); }

  static int pack(LaneElements const& elements, LaneColumn<kMaxRows>& column) {
    for (int i = 0; i < kRegisters; ++i) column[i] = elements[2 * i] | uint32_t{elements[2 * i + 1]} << 16;
    return kMaxRows;
  }

  static __device__ void decode(uint32_t column, Fragments& fragments) {
    CUTE_UNROLL
    for (int i = 0; i < kRegisters; ++i) fragments(i) = ptx::load_shared_u32(column + i * kRowBytes);
  }
};

// ---- Device --------------------------------------------------------------------------------------------------------

// blocks (kPatterns, rows, 32). fragments (kPatterns, 32, kRegisters) of the first CTA, only if kDump.
// sums (gridDim, threads) keeps the MMAs alive. clocks (gridDim): SM clocks until the CTA's last warp was through.
template <class Scheme, int kWarps, bool kDump>
__global__ void __launch_bounds__(kWarps* kLanes)
    decode_loop(uint32_t const* blocks, int rows, int iterations, uint32_t* fragments, float* sums, long long* clocks) {
  extern __shared__ __align__(kRowBytes) uint32_t shared[];  // (kWarps, rows, 32)
  int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, pattern = warp % kPatterns;
  uint32_t* mine = shared + (warp * rows) * kLanes + lane;
  for (int r = 0; r < rows; ++r) mine[r * kLanes] = blocks[(pattern * rows + r) * kLanes + lane];
  uint32_t column = cast_smem_ptr_to_uint(mine), block_bytes = rows * kRowBytes;
  uint32_t end = cast_smem_ptr_to_uint(shared) + kWarps * block_bytes;
  __syncthreads();

  constexpr uint32_t kOnes = 0x3c003c00;
  float sum[2][4] = {};  // two chains of MMAs, so that none waits for the one before it
  Fragments registers;
  long long start = clock64();
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    Scheme::decode(column, registers);
    CUTE_UNROLL
    for (int r = 0; r < kRegisters; r += kAtomRegisters) {
      float (&c)[4] = sum[r / kAtomRegisters % 2];
      SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], registers(r), registers(r + 1), registers(r + 2),
                                        registers(r + 3), kOnes, kOnes, c[0], c[1], c[2], c[3]);
    }
    column += block_bytes;  // another warp's block: the assembler would hoist loads of the same one out of the loop
    if (column >= end) column -= kWarps * block_bytes;
  }
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;

  sums[blockIdx.x * blockDim.x + threadIdx.x] =
      sum[0][0] + sum[0][1] + sum[0][2] + sum[0][3] + sum[1][0] + sum[1][1] + sum[1][2] + sum[1][3];
  if constexpr (kDump) {
    if (blockIdx.x != 0 || warp >= kPatterns) return;
    for (int r = 0; r < kRegisters; ++r) fragments[(warp * kLanes + lane) * kRegisters + r] = registers(r);
  }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) { check_cuda(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc"); }
  explicit DeviceArray(std::vector<T> const& host) : DeviceArray(host.size()) {
    check_cuda(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
  }
  DeviceArray(DeviceArray const&) = delete;
  DeviceArray& operator=(DeviceArray const&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> to_host() const {
    std::vector<T> host(size_);
    check_cuda(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// Every element is present with probability `density`, independently: (kPatterns * 32) lanes.
template <class Scheme>
std::vector<LaneElements> random_lanes(double density) {
  std::mt19937 random(1);
  std::bernoulli_distribution present(density);
  std::vector<LaneElements> lanes(kPatterns * kLanes);
  for (LaneElements& elements : lanes)
    for (uint16_t& value : elements) value = present(random) ? Scheme::value(random()) : uint16_t{0};
  return lanes;
}

// (kPatterns, rows, 32), with as many rows as the neediest lane asks for.
template <class Scheme>
std::vector<uint32_t> pack_blocks(std::vector<LaneElements> const& lanes, int& rows) {
  std::vector<LaneColumn<Scheme::kMaxRows>> columns(lanes.size());  // zeros
  rows = 0;
  for (size_t i = 0; i < lanes.size(); ++i) rows = std::max(rows, Scheme::pack(lanes[i], columns[i]));
  std::vector<uint32_t> blocks(kPatterns * rows * kLanes);
  for (size_t i = 0; i < lanes.size(); ++i)
    for (int r = 0; r < rows; ++r) blocks[(i / kLanes * rows + r) * kLanes + i % kLanes] = columns[i][r];
  return blocks;
}

int count_wrong(std::vector<LaneElements> const& want, std::vector<uint32_t> const& fragments) {
  int wrong = 0;
  for (size_t i = 0; i < want.size(); ++i)
    for (int e = 0; e < kLaneElements; ++e) {
      uint32_t got = fragments[i * kRegisters + e / 2] >> (16 * (e % 2)) & 0xffff;
      wrong += got != want[i][e];
    }
  return wrong;
}

// Prints one line; returns whether every element was decoded right.
template <class Scheme, int kWarps>
bool measure(double density, int multiprocessors) {
  static_assert(kWarps >= kPatterns, "every pattern must be checked");
  std::vector<LaneElements> lanes = random_lanes<Scheme>(density);
  int rows;
  DeviceArray<uint32_t> blocks(pack_blocks<Scheme>(lanes, rows));
  DeviceArray<uint32_t> fragments(size_t{kPatterns} * kLanes * kRegisters);
  DeviceArray<float> sums(size_t(multiprocessors) * kWarps * kLanes);
  DeviceArray<long long> clocks(multiprocessors);

  int shared_bytes = (kWarps * rows + Scheme::kRowsBehind) * kRowBytes;
  auto launch = [&](auto* kernel, int iterations) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "shared memory of a block");
    kernel<<<multiprocessors, kWarps * kLanes, shared_bytes>>>(blocks.data(), rows, iterations, fragments.data(),
                                                               sums.data(), clocks.data());
    check_cuda(cudaGetLastError(), "launch");
  };

  launch(decode_loop<Scheme, kWarps, true>, 1);
  int wrong = count_wrong(lanes, fragments.to_host());

  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  launch(decode_loop<Scheme, kWarps, false>, kIterations);  // warms up
  check_cuda(cudaEventRecord(begin), "cudaEventRecord");
  launch(decode_loop<Scheme, kWarps, false>, kIterations);
  check_cuda(cudaEventRecord(end), "cudaEventRecord");
  check_cuda(cudaEventSynchronize(end), "decode_loop");
  float milliseconds;
  check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);

  std::vector<long long> all_clocks = clocks.to_host();
  double slowest = static_cast<double>(*std::max_element(all_clocks.begin(), all_clocks.end()));
  double elements = double{kIterations} * kWarps * kLanes * kLaneElements;  // of one SM
  std::printf("%s,%.2f,%d,%.2f,%.0f,%d\n", Scheme::kName, density, kWarps, elements / slowest,
              elements * multiprocessors / milliseconds / 1e6, wrong);
  std::fflush(stdout);
  return wrong == 0;
}

template <class Scheme>
bool measure_all(int multiprocessors) {
  bool right = true;
  for (double density : {0.5, 0.3}) {
    right &= measure<Scheme, 8>(density, multiprocessors);
    right &= measure<Scheme, 12>(density, multiprocessors);
    right &= measure<Scheme, 16>(density, multiprocessors);
    right &= measure<Scheme, 24>(density, multiprocessors);
    right &= measure<Scheme, 32>(density, multiprocessors);
  }
  return right;
}

}  // namespace cute_kernels::profiling

int main() try {
  using namespace cute_kernels::profiling;
  namespace format = cute_kernels::format;
  int device, multiprocessors;
  cute_kernels::check_cuda(cudaGetDevice(&device), "no CUDA device");
  cute_kernels::check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "device");
  std::puts("scheme,density,warps,elements_per_clk_sm,gigaelements_per_s,wrong");
  bool right = measure_all<SplitStreams>(multiprocessors);
  right &= measure_all<NarrowStreams<format::Fp8Codec>>(multiprocessors);
  right &= measure_all<NarrowStreams<format::Int8Codec>>(multiprocessors);
  right &= measure_all<NarrowStreams<format::Int4Codec>>(multiprocessors);
  right &= measure_all<Dense>(multiprocessors);
  return right ? 0 : 1;
} catch (std::exception const& error) {
  std::fprintf(stderr, "decode_microbench: %s\n", error.what());
  return 2;
}
