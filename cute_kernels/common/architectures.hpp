// What runs where, by the tables of architectures.def. Host code that needs no CUDA.
#pragma once

#include <string>
#include <string_view>

// The architectures that this library is compiled for, as TORCH_CUDA_ARCH_LIST spells them, separated by ';'.
#ifndef CUTE_KERNELS_ARCHS
#define CUTE_KERNELS_ARCHS ""
#endif

namespace cute_kernels {

// See architectures.def for the fields of both.
struct Architecture {
  std::string_view name, alias, family, oldest_cuda;
  bool by_default, bulk_copies, wgmma, programmatic_launch;
};

struct Backend {
  std::string_view name, oldest, newest, architecture;
};

inline constexpr Architecture kArchitectures[] = {
#define CUTE_KERNELS_ARCHITECTURE(...) {__VA_ARGS__},
#include "cute_kernels/common/architectures.def"
};

inline constexpr Backend kBackends[] = {
#define CUTE_KERNELS_BACKEND(...) {__VA_ARGS__},
#include "cute_kernels/common/architectures.def"
};

inline constexpr std::string_view kBuiltArchs = CUTE_KERNELS_ARCHS;

struct Capability {
  int major, minor;

  constexpr bool operator==(Capability other) const { return major == other.major && minor == other.minor; }
  constexpr bool operator<=(Capability other) const {
    return major < other.major || (major == other.major && minor <= other.minor);
  }
};

// An architecture that a library is built for, such as "8.0", "8.6+PTX" or "9.0a".
struct BuiltArch {
  std::string_view name;    // without +PTX
  Capability capability{};  // that the code is for
  bool specific = false;    // to that capability: a trailing "a"
  bool ptx = false;

  constexpr explicit BuiltArch(std::string_view text) : name(text.substr(0, text.find('+'))) {
    int number = 0;
    for (char c : name) {
      if (c == '.') {
        capability.major = number;
        number = 0;
      } else if (c == 'a') {
        specific = true;
      } else {
        number = 10 * number + (c - '0');
      }
    }
    capability.minor = number;
    ptx = name.size() < text.size();
  }
};

constexpr Capability parse_capability(std::string_view text) { return BuiltArch(text).capability; }

// Machine code runs on its own major version from its minor version up, PTX on every later device; what is specific to
// a capability, its PTX too, on that one alone.
constexpr bool runs_on(BuiltArch const& arch, Capability device) {
  if (arch.specific) return device == arch.capability;
  return arch.capability <= device && (arch.ptx || device.major == arch.capability.major);
}

// Does `holds` hold for an entry of `archs`, a list separated by ';'?
template <class Predicate>
constexpr bool any_arch(std::string_view archs, Predicate const& holds) {
  while (!archs.empty()) {
    std::size_t end = archs.find(';');
    if (holds(BuiltArch(archs.substr(0, end)))) return true;
    archs = end == std::string_view::npos ? std::string_view() : archs.substr(end + 1);
  }
  return false;
}

// The table's row of a name; null: there is none.
constexpr Architecture const* find_architecture(std::string_view name) {
  for (Architecture const& arch : kArchitectures)
    if (arch.name == name) return &arch;
  return nullptr;
}

constexpr Backend const* find_backend(std::string_view name) {
  for (Backend const& backend : kBackends)
    if (backend.name == name) return &backend;
  return nullptr;
}

constexpr bool takes(Backend const& backend, Capability device) {
  return parse_capability(backend.oldest) <= device && device <= parse_capability(backend.newest);
}

// Does a library built for `archs` hold this backend's kernels?
constexpr bool is_built(Backend const& backend, std::string_view archs = kBuiltArchs) {
  return any_arch(
      archs, [&](BuiltArch const& arch) { return backend.architecture.empty() || backend.architecture == arch.name; });
}

// A constant, by which `if constexpr` leaves out calls of kernels that are not there to be linked.
constexpr bool has_backend(std::string_view name) {
  Backend const* backend = find_backend(name);
  return backend && is_built(*backend);
}

// Does the code that this device runs start a kernel while the one before it drains? PTX that the driver compiles keeps
// to what the architecture that it was written for may use.
constexpr bool has_programmatic_launch(Capability device, std::string_view archs = kBuiltArchs) {
  return any_arch(archs, [&](BuiltArch const& arch) {
    Architecture const* row = find_architecture(arch.name);
    return row && row->programmatic_launch && runs_on(arch, device);
  });
}

// The backend that "auto" takes on a device. Where none takes it, the first, whose status says so.
constexpr Backend const& automatic_backend(Capability device) {
  Backend const* chosen = &kBackends[0];
  for (Backend const& backend : kBackends)
    if (takes(backend, device)) chosen = &backend;
  return *chosen;
}

inline std::string to_string(Capability device) {
  return std::to_string(device.major) + "." + std::to_string(device.minor);
}

// "8.0 to 9.0"
inline std::string devices_of(Backend const& backend) {
  std::string text(backend.oldest);
  return backend.oldest == backend.newest ? text : text + " to " + std::string(backend.newest);
}

// Why a library built for `archs` has no code at all for a device, or empty.
inline std::string build_status(Capability device, std::string_view archs = kBuiltArchs) {
  if (archs.empty()) return "extension built without CUDA (no nvcc at build time, or CUTE_KERNELS_CUDA=0)";
  if (any_arch(archs, [&](BuiltArch const& arch) { return runs_on(arch, device); })) return "";
  return "extension built without kernels for compute capability " + to_string(device) +
         " (TORCH_CUDA_ARCH_LIST: " + std::string(archs) + ")";
}

// Why a backend of a library built for `archs` cannot serve a call on a device, or empty.
inline std::string backend_status(std::string_view name, Capability device, std::string_view archs = kBuiltArchs) {
  Backend const* backend = find_backend(name);
  if (!backend) return "there is no such GPU backend";
  if (archs.empty()) return build_status(device, archs);
  if (!takes(automatic_backend(device), device)) {
    std::string all;
    for (Backend const& other : kBackends)
      all += (all.empty() ? "" : ", ") + std::string(other.name) + " takes " + devices_of(other);
    return "no backend has kernels for compute capability " + to_string(device) + " (" + all + ")";
  }
  if (!takes(*backend, device))
    return "device has compute capability " + to_string(device) + ", needs " + devices_of(*backend);
  if (!is_built(*backend, archs))
    return "extension built without " + std::string(backend->architecture) + ", which " + std::string(name) +
           " needs (TORCH_CUDA_ARCH_LIST: " + std::string(archs) + ")";
  return build_status(device, archs);
}

}  // namespace cute_kernels
