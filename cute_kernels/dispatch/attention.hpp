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

// Whether CC 9.0 has a kernel for many query rows over such caches; without one they are attended to in passes.
bool has_prefill_kernel(format::CodecId codec, format::TileFormatId tile_format);

}  // namespace cute_kernels::dispatch
