// Where the slots of keys and values are, which are of float32 or of 16 bits.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "../elements.h"
#include "../handles.h"
#include "../vectors.h"

namespace {

using torch::stable::Tensor;

// The keys or values of some slots of one head.
template <class Element>
struct HeadSlots {
  const Element* data;
  int64_t stride, count;

  // Processors prefetch by themselves within a page of memory only.
  ALWAYS_INLINE void prefetch(int64_t slot, int64_t from, int64_t to) const {
    constexpr int64_t line = 64 / sizeof(Element);
    for (int64_t at = from; slot < count && at < to; at += line) __builtin_prefetch(data + slot * stride + at, 0, 2);
  }
};

// Keys or values [rows, heads, slots, width] of a segment.
struct Slots {
  Type type;
  const void* data;
  int64_t rows, heads, count, width, of_row, of_head, stride, first = 0;

  Slots(Borrowed of)
      : type(type_of(of)), data(of.values<void>()), rows(of.size(0)), heads(of.size(1)), count(of.size(2)),
        width(of.size(3)), of_row(of.stride(0)), of_head(of.stride(1)), stride(of.stride(2)) {
    STD_TORCH_CHECK(type != Type::none, other_types);
    STD_TORCH_CHECK(width == 1 || of.stride(3) == 1, "the elements of a slot have to be contiguous");
  }

  // Those from `begin` to `end`.
  Slots(Borrowed of, int64_t begin, int64_t end) : Slots(of) {
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= count, "slots ", begin, " to ", end, " of ", count);
    first = begin, count = end - begin;
  }

  template <class Element>
  HeadSlots<Element> of(int64_t row, int64_t head, int64_t begin, int64_t some) const {
    return {static_cast<const Element*>(data) + row * of_row + head * of_head + (first + begin) * stride, stride, some};
  }
};

// Some slots as float32: where they are, or widened in memory that the next ones take over.
class FloatSlots {
  std::vector<float> memory_;

 public:
  HeadSlots<float> of(const Slots& slots, int64_t row, int64_t head, int64_t begin, int64_t some) {
    if (slots.type == Type::float32) return slots.of<float>(row, head, begin, some);
    memory_.resize(some * slots.width);
    with_element(slots.type, [&](auto element) {
      const auto from = slots.of<decltype(element)>(row, head, begin, some);
      for (int64_t slot = 0; slot < some; slot++)
        widen(from.data + slot * from.stride, slots.width, &memory_[slot * slots.width]);
    });
    return {memory_.data(), slots.width, some};
  }
};

}  // namespace
