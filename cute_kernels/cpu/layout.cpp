#include "cute_kernels/cpu/layout.hpp"

#include <stdexcept>

#include "cute_kernels/format/head_dim.hpp"

namespace cute_kernels::cpu {
namespace {

using format::Role;

template <Role kRole, int HeadDim>
std::vector<uint16_t> make_element_table() {
  constexpr auto layout = TileFormat::element_layout<kRole, HeadDim>();
  constexpr int kElements = TileFormat::lane_elements(HeadDim);
  std::vector<uint16_t> table(format::kLanes * kElements);
  for (int lane = 0; lane < format::kLanes; ++lane)
    for (int e = 0; e < kElements; ++e) table[lane * kElements + e] = static_cast<uint16_t>(layout(lane, e));
  return table;
}

ProductLayout make_product_layout(Role role, int head_dim) {
  std::vector<uint16_t> const& table = element_table(role, head_dim);
  bool const is_key = role == Role::kKey;
  int const blocks = (is_key ? format::kTileTokens : head_dim) / 16;
  int const elements = TileFormat::lane_elements(head_dim), entries = elements / kStreams / blocks;
  ProductLayout layout;
  layout.blocks = blocks;
  layout.entries = entries;
  layout.sum_position.resize(kLaneRows * blocks * 2);
  layout.operand_position.resize(kLaneColumns * kStreams * entries);

  auto visit = [&](auto&& f) {
    for (int lane = 0; lane < format::kLanes; ++lane)
      for (int e = 0; e < elements; ++e) {
        int row = lane / kLaneColumns, column = lane % kLaneColumns;
        int s = TileFormat::stream(e), k = e / kStreams % entries, c = e / kStreams / entries;
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

}  // namespace

std::vector<uint16_t> const& element_table(Role role, int padded_head_dim) {
  return format::visit_head_dim(padded_head_dim, [&](auto head_dim) -> std::vector<uint16_t> const& {
    static std::vector<uint16_t> const keys = make_element_table<Role::kKey, head_dim()>();
    static std::vector<uint16_t> const values = make_element_table<Role::kValue, head_dim()>();
    return role == Role::kKey ? keys : values;
  });
}

ProductLayout const& product_layout(Role role, int padded_head_dim) {
  return format::visit_head_dim(padded_head_dim, [&](auto head_dim) -> ProductLayout const& {
    static ProductLayout const keys = make_product_layout(Role::kKey, head_dim());
    static ProductLayout const values = make_product_layout(Role::kValue, head_dim());
    return role == Role::kKey ? keys : values;
  });
}

}  // namespace cute_kernels::cpu
