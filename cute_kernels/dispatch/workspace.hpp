// Scratch memory of a call: asked for by those that need it, which many do not.
#pragma once

#include <cstdint>
#include <functional>

namespace cute_kernels::dispatch {

using Workspace = std::function<void*(int64_t bytes)>;  // on the current device, until the call's kernels are through

}  // namespace cute_kernels::dispatch
