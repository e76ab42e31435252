// Attention as the bindings call it: arch x head_dim x dtype -> launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cute_kernels/attention/problem.hpp"
#include "cute_kernels/dispatch/workspace.hpp"

namespace cute_kernels::dispatch {

// On the current device. Nothing is synchronised. Throws std::runtime_error if the backend cannot serve.
void run(attention::Problem const& problem, Workspace const& workspace, std::string const& backend,
         cudaStream_t stream);

}  // namespace cute_kernels::dispatch
