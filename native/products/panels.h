// Products of many rows with weights that are decoded first.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <memory>

#include "rows.h"

namespace {

// A panel [inputs, 2 vectors of outputs] is decoded at a time: it stays in the processor's nearest cache while all rows
// are multiplied with it.
class Panels {
 public:
  static constexpr int64_t most_rows = lanes == 16 ? 256 : 128;  // whose inputs of a panel stay in the cache too

  explicit Panels(const Rows& input) : rows(input.count), width(input.width), values(new float[rows * width]) {
    constexpr int64_t most = lanes == 16 ? 12 : 6;  // rows whose sums stay in registers
    const int64_t tiles = (rows + most - 1) / most;
    side = (rows + tiles - 1) / tiles;
    torch::stable::parallel_for(0, (rows + side - 1) / side, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * side; row < std::min(end * side, rows); row += side) {
        const int64_t count = std::min(side, rows - row);
        transpose(input.values + row * input.stride, input.stride, count, width, values.get() + row * width, count);
      }
    });
  }

  // The products of inputs from `i` on with a panel: `out` is written for the first inputs, and added to for others.
  void multiply(const float* panel, int64_t i, int64_t inputs, float* out, int64_t out_stride) const {
    for (int64_t row = 0; row < rows; row += side) {
      const int64_t count = std::min(side, rows - row);
      const float* from = values.get() + row * width + i * count;
      multiply_some<lanes == 16 ? 12 : 6>(count, from, panel, inputs, out + row * out_stride, out_stride, i == 0);
    }
  }

 private:
  int64_t rows, width, side;  // rows of a tile, of which the last has fewer
  std::unique_ptr<float[]> values;  // tiles [width, rows of the tile]

  template <int some_rows>
  static void multiply_some(
      int64_t count, const float* from, const float* panel, int64_t inputs, float* out, int64_t out_stride, bool first) {
    if constexpr (some_rows > 0) {
      if (count < some_rows)
        return multiply_some<some_rows - 1>(count, from, panel, inputs, out, out_stride, first);
      Lanes sums[some_rows][2] = {};
      if (!first)
        for (int row = 0; row < some_rows; row++) std::memcpy(sums[row], out + row * out_stride, sizeof(sums[row]));
      for (int64_t i = 0; i < inputs; i++, from += some_rows, panel += 2 * lanes) {
        const Lanes weights[2] = {load(panel), load(panel + lanes)};
        for (int row = 0; row < some_rows; row++)
          for (int v = 0; v < 2; v++) add_product(sums[row][v], from[row] + Lanes{}, weights[v]);
      }
      for (int row = 0; row < some_rows; row++) std::memcpy(out + row * out_stride, sums[row], sizeof(sums[row]));
    }
  }
};

}  // namespace
