// In place of CuTe's.
#pragma once

#include "emulated_cta.hpp"

namespace cute {

// Brings the lanes together, as the instruction does.
inline bool elect_one_sync() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

}  // namespace cute
