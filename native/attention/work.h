// Attention of many rows, as the parts of it that are computed apart.
#pragma once

#include <cstdint>
#include <vector>

#include "slots.h"
#include "softmax.h"

namespace {

struct Segment {
  Slots keys, values;
  int64_t begin;  // its first slot in the mask
};

// Consecutive rows: of one cache.
struct Part {
  int64_t first, rows, prompts;
  std::vector<Segment> common, own;  // of prompts, and of rows
  int64_t common_slots = 0;
  int64_t shares = 0;  // of the common slots, each with a softmax of its own
  int64_t at = 0;  // where those of its queries begin: [shares, rows, heads, queries]
};

struct Work {
  const float* queries;  // [rows, heads, queries, width]
  const float* mask;  // or null
  int64_t rows, heads, each, width, out_width;  // each: queries per row and head
  int64_t mask_strides[4];
  std::vector<Part> parts;
  std::vector<float> sums;  // of each softmax of the common slots [out_width]
  std::vector<Softmax> softmax;

  int64_t at(int64_t row, int64_t head, int64_t query) const { return (row * heads + head) * each + query; }

  int64_t common_at(const Part& part, int64_t share, int64_t row, int64_t head, int64_t query) const {
    return part.at + at(share * part.rows + row - part.first, head, query);
  }

  float added(int64_t row, int64_t head, int64_t query, int64_t slot) const {
    return mask[row * mask_strides[0] + head * mask_strides[1] + query * mask_strides[2] + slot * mask_strides[3]];
  }
};

}  // namespace
