// What the current device is, and which backends it can run.
#pragma once

#include <string>

#include "cute_kernels/dispatch/heuristics.hpp"

namespace cute_kernels::dispatch {

// Is a backend, "sm80" or "sm90", compiled into this library?
bool has_backend(std::string const& backend);

// Of the current device; asked for once.
DeviceLimits current_device();

// Throws std::runtime_error unless the library has the backend and the device can run it.
void require_backend(std::string const& backend, DeviceLimits const& device);

}  // namespace cute_kernels::dispatch
