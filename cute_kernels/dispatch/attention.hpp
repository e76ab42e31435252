// Attention as the bindings call it: arch x head_dim x dtype -> launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cute_kernels/attention/problem.hpp"

namespace cute_kernels::dispatch {

// Scratch memory that run() needs on the current device.
int64_t attention_workspace_bytes(format::SparseView const& keys, int batch, int q_heads, int q_tokens,
                                  std::string const& backend);

// On the current device. Nothing is synchronised or allocated. Throws std::runtime_error if the backend cannot serve.
void run(attention::Problem const& problem, void* workspace, std::string const& backend, cudaStream_t stream);

}  // namespace cute_kernels::dispatch
