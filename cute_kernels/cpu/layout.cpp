#include "cute_kernels/cpu/layout.hpp"

#include <stdexcept>
#include <string>

namespace cute_kernels::cpu {
namespace {

using format::Role;

template <Role kRole, int HeadDim>
std::vector<uint16_t> make_element_table() {
  constexpr auto layout = format::element_layout<kRole, HeadDim>();
  constexpr int kElements = format::lane_elements(HeadDim);
  std::vector<uint16_t> table(format::kLanes * kElements);
  for (int lane = 0; lane < format::kLanes; ++lane)
    for (int e = 0; e < kElements; ++e) table[lane * kElements + e] = static_cast<uint16_t>(layout(lane, e));
  return table;
}

ProductLayout make_product_layout(Role role, int head_dim) {
  const std::vector<uint16_t>& table = element_table(role, head_dim);
  const bool is_key = role == Role::kKey;
  const int blocks = (is_key ? format::kTileTokens : head_dim) / 16;
  const int elements = format::lane_elements(head_dim), entries = elements / kStreams / blocks;
  ProductLayout layout{blocks, entries, {}, {}};
  layout.sum_position.resize(kLaneRows * blocks * 2);
  layout.operand_position.resize(kLaneColumns * kStreams * entries);

  auto visit = [&](auto&& f) {
    for (int lane = 0; lane < format::kLanes; ++lane)
      for (int e = 0; e < elements; ++e) {
        int row = lane / kLaneColumns, column = lane % kLaneColumns;
        int s = format::Codec16::stream(e), k = e / kStreams % entries, c = e / kStreams / entries;
        int position = table[lane * elements + e];
        uint8_t& sum = layout.sum_position[(row * blocks + c) * 2 + k / 2 % 2];
        uint8_t& operand = layout.operand_position[(column * kStreams + s) * entries + k];
        f(is_key ? sum : operand, is_key ? operand : sum, position);
      }
  };
  visit([&](uint8_t& token, uint8_t& channel, int position) {
    token = static_cast<uint8_t>(position / head_dim);
    channel = static_cast<uint8_t>(position % head_dim);
  });
  visit([&](uint8_t& token, uint8_t& channel, int position) {
    if (token * head_dim + channel != position)
      throw std::logic_error(
          "element_layout does not factor as cpu/layout.hpp says; the CPU products need another layout");
  });
  return layout;
}

// One T for each role and head_dim that tiles have.
template <class T>
struct Tables {
  static constexpr int kHeadDims[] = {format::kMinHeadDim, 2 * format::kMinHeadDim, format::kMaxHeadDim};
  static_assert(4 * format::kMinHeadDim == format::kMaxHeadDim);
  T of[2][3];  // [role][index in kHeadDims]

  const T& get(Role role, int head_dim) const {
    for (int i = 0; i < 3; ++i)
      if (kHeadDims[i] == head_dim) return of[static_cast<int>(role)][i];
    throw std::logic_error("no tile holds " + std::to_string(head_dim) + " channels");
  }
};

template <Role kRole>
void make_element_tables(Tables<std::vector<uint16_t>>& tables) {
  auto& of = tables.of[static_cast<int>(kRole)];
  of[0] = make_element_table<kRole, Tables<std::vector<uint16_t>>::kHeadDims[0]>();
  of[1] = make_element_table<kRole, Tables<std::vector<uint16_t>>::kHeadDims[1]>();
  of[2] = make_element_table<kRole, Tables<std::vector<uint16_t>>::kHeadDims[2]>();
}

}  // namespace

const std::vector<uint16_t>& element_table(Role role, int padded_head_dim) {
  static const Tables<std::vector<uint16_t>> tables = [] {
    Tables<std::vector<uint16_t>> made;
    make_element_tables<Role::kKey>(made);
    make_element_tables<Role::kValue>(made);
    return made;
  }();
  return tables.get(role, padded_head_dim);
}

const ProductLayout& product_layout(Role role, int padded_head_dim) {
  static const Tables<ProductLayout> tables = [] {
    Tables<ProductLayout> made;
    for (Role r : {Role::kKey, Role::kValue})
      for (int i = 0; i < 3; ++i)
        made.of[static_cast<int>(r)][i] = make_product_layout(r, Tables<ProductLayout>::kHeadDims[i]);
    return made;
  }();
  return tables.get(role, padded_head_dim);
}

}  // namespace cute_kernels::cpu
