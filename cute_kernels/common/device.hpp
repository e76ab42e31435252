// What the current device is.
#pragma once

namespace cute_kernels {

inline constexpr int kMaxCluster = 16;  // CTAs, more than every device must have

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;                        // a CTA may have, opt-in
  int major, minor;                        // compute capability
  bool programmatic_launch;                // by the device and by the code built for it
  int max_clusters[kMaxCluster + 1] = {};  // of so many CTAs, one an SM, that run at a time; of 0 and 1: none
};

// Of the current device; asked for once. std::runtime_error on a CUDA error.
DeviceLimits current_device();

}  // namespace cute_kernels
