// Attention as the bindings call it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cute_kernels/dispatch/tuning.hpp"
#include "cute_kernels/dispatch/workspace.hpp"
#include "cute_kernels/ops/attention/problem.hpp"

namespace cute_kernels::dispatch {

// On the current device. Nothing is synchronised. std::runtime_error if the backend cannot serve.
void run(attention::Problem const& problem, Workspace const& workspace, std::string const& backend,
         Tuning const& tuning, cudaStream_t stream);

}  // namespace cute_kernels::dispatch
