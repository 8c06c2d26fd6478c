// Where the slots of keys and values are.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "../handles.h"
#include "../vectors.h"

namespace {

using torch::stable::Tensor;

// The keys or values of some slots of one head.
struct HeadSlots {
  const float* data;
  int64_t stride, count;

  // Processors prefetch by themselves within a page of memory only.
  ALWAYS_INLINE void prefetch(int64_t slot, int64_t from, int64_t to) const {
    for (int64_t at = from; slot < count && at < to; at += 16) __builtin_prefetch(data + slot * stride + at, 0, 2);
  }
};

constexpr char not_floats[] = "tensors of another data type than float32";

// Keys or values [rows, heads, slots, width] of a segment.
struct Slots {
  const float* data;
  int64_t rows, heads, count, width, of_row, of_head, stride;

  Slots(Borrowed of)
      : rows(of.size(0)), heads(of.size(1)), count(of.size(2)), width(of.size(3)), of_row(of.stride(0)),
        of_head(of.stride(1)), stride(of.stride(2)) {
    STD_TORCH_CHECK(of.is_float(), not_floats);
    STD_TORCH_CHECK(width == 1 || of.stride(3) == 1, "the elements of a slot have to be contiguous");
    data = of.values<float>();
  }

  // Those from `begin` to `end`.
  Slots(Borrowed of, int64_t begin, int64_t end) : Slots(of) {
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= count, "slots ", begin, " to ", end, " of ", count);
    data += begin * stride, count = end - begin;
  }

  HeadSlots of(int64_t row, int64_t head, int64_t first, int64_t some) const {
    return {data + row * of_row + head * of_head + first * stride, stride, some};
  }
};

}  // namespace
