// That a device can run a backend.
#pragma once

#include <stdexcept>
#include <string>

#include "cute_kernels/common/architectures.hpp"
#include "cute_kernels/common/device.hpp"

namespace cute_kernels::dispatch {

// Throws std::runtime_error unless the library has the backend and the device can run it.
inline void require_backend(std::string const& backend, DeviceLimits const& device) {
  std::string status = backend_status(backend, {device.major, device.minor});
  if (!status.empty()) throw std::runtime_error("backend '" + backend + "' cannot serve this call: " + status);
}

}  // namespace cute_kernels::dispatch
