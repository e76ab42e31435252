// What device code names that a compiler for the host does not know, so that its arithmetic can be tested: one thread.
#pragma once

#include <algorithm>

struct DeviceIndex {
  int x;
};
inline DeviceIndex blockIdx{0}, threadIdx{0}, blockDim{1};

using std::max;
using std::min;

template <class T>
T __ldg(T const* address) {
  return *address;
}
inline void __syncthreads() {}
inline void __syncwarp() {}
// Of a single thread there are no lanes to ask: code that does is not for the host.
int __shfl_sync(unsigned, int, int);
int __shfl_up_sync(unsigned, int, int);
int __shfl_down_sync(unsigned, int, int);
int __reduce_max_sync(unsigned, int);
