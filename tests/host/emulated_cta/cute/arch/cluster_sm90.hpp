// In place of CuTe's.
#pragma once

#include "emulated_cta.hpp"

namespace cute {

inline bool elect_one_sync() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

}  // namespace cute
