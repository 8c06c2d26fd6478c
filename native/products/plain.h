// Products with weights as they are, float32 or of 16 bits, which are read once for few rows. Sums are float32.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <memory>
#include <type_traits>

#include "elements.h"
#include "rows.h"

// AMD Zen 4 computes a vector of 64 bytes in two halves; compilers that do not know it take it for Zen 2 or 3.
#if defined(__AVX512F__) && !defined(__znver2__) && !defined(__znver3__) && !defined(__znver4__)
constexpr bool full_width = true;
#else
constexpr bool full_width = false;
#endif

namespace {

// The sums of a tile stay in registers: there are 32 with AVX-512, otherwise 16.
constexpr int outs_at_once = full_width ? 6 : 4, rows_at_once = full_width ? 4 : lanes == 16 ? 6 : 2;
constexpr int outs_of_tile = lanes == 16 && !full_width ? 8 : 24;
constexpr int streams = full_width ? 12 : 8;  // of weights, for one row: AMD Zen 4 alone reads one faster
// Rows that are computed as columns, in groups of two vectors or less.
constexpr int64_t most_of_group = 2 * lanes;
constexpr int64_t always_columns = lanes == 16 ? 32 : 10;  // from so many rows on
constexpr bool fetches_columns = lanes == 16;  // AMD Zen 3 is slower with it, most where the width is a power of two
constexpr int64_t lanes_for(int64_t rows) { return (rows + 7) / 8 * 8; }
constexpr int64_t group_at(int64_t row, int64_t rows) {
  int64_t size = most_of_group;
  while (size > 8 && row + size > lanes_for(rows)) size /= 2;
  return size;
}
// The first rows, which are computed as columns: at full width whole groups, otherwise all where they fill the lanes or
// lack few of them.
constexpr int64_t rows_as_columns(int64_t rows) {
  if (full_width) return rows / most_of_group * most_of_group;
  return rows < always_columns && rows * 8 < lanes_for(rows) * 7 ? 0 : rows;
}

static_assert(outs_of_tile % outs_at_once == 0 && outs_of_tile % streams == 0);

// A product of matrices: input [rows, width] and weight [outs, width], the width contiguous -> out [rows, outs], whose
// rows are `out_stride` apart, plus bias [outs] if it is not null.
template <class Weight, class Element = Weight>
struct Product {
  const float* input;
  const Weight* weight;
  const Element* bias;
  Element* out;
  int64_t rows, outs, width, input_stride, weight_stride, out_stride;
  const float* columns;  // see `columns_of`

  void put(int64_t row, int64_t one, float sum) const {
    round_to(bias ? sum + as_float(bias[one]) : sum, out + row * out_stride + one);
  }

  // `fetched`: the weights that are read next, or null.
  template <int some_rows, int some_outs>
  void tile(int64_t row, int64_t first, const Weight* fetched, int64_t pass = 0, int64_t passes = 1) const {
    const float* from = input + row * input_stride;
    const Weight* by = weight + first * weight_stride;
    Lanes sums[some_rows][some_outs] = {};
    const Weight* ahead = fetched + pass * width / passes;
    int64_t i = 0, due = fetched ? 0 : -1;
    for (; i + lanes <= width; i += lanes) {
      Lanes weights[some_outs];
      for (int one = 0; one < some_outs; one++) weights[one] = floats(by + one * weight_stride + i);
      if (i == due) {
        for (int one = 0; one < some_outs; one++) __builtin_prefetch(ahead + one * weight_stride, 0, 2);
        due += lanes * passes, ahead += lanes;
      }
      for (int other = 0; other < some_rows; other++) {
        const Lanes values = load(from + other * input_stride + i);
        for (int one = 0; one < some_outs; one++) add_product(sums[other][one], values, weights[one]);
      }
    }
    float totals[some_rows][some_outs];
    sum_each<some_rows * some_outs>(sums[0], totals[0]);
    if (i < width)
      for (int other = 0; other < some_rows; other++)
        for (int one = 0; one < some_outs; one++)
          for (int64_t rest = i; rest < width; rest++)
            add_product(totals[other][one], from[other * input_stride + rest], as_float(by[one * weight_stride + rest]));
    for (int one = 0; one < some_outs; one++)
      for (int other = 0; other < some_rows; other++) put(row + other, first + one, totals[other][one]);
  }

  template <int some_rows, int some_outs>
  void rest(int64_t row, int64_t first, const Weight* fetched, int64_t pass, int64_t passes) const {
    if constexpr (some_rows > 0) {
      if (rows - row == some_rows)
        tile<some_rows, some_outs>(row, first, fetched, pass, passes);
      else
        rest<some_rows - 1, some_outs>(row, first, fetched, pass, passes);
    }
  }

  template <int some_outs>
  void all_rows(int64_t row, int64_t first, const Weight* fetched) const {
    const int64_t passes = (rows - row + rows_at_once - 1) / rows_at_once;
    int64_t pass = 0;
    for (; row + rows_at_once <= rows; row += rows_at_once)
      tile<rows_at_once, some_outs>(row, first, fetched, pass++, passes);
    rest<rows_at_once - 1, some_outs>(row, first, fetched, pass, passes);
  }

  // The rows from `row` on, and the outputs from `first` to `end`.
  void by_rows(int64_t row, int64_t first, int64_t end) const {
    for (; first + outs_at_once <= end; first += outs_at_once) {
      const int64_t next = first + outs_at_once;
      const bool fetches = row == 0 && next + outs_at_once <= end;
      all_rows<outs_at_once>(row, first, fetches ? weight + next * weight_stride : nullptr);
    }
    for (; first < end; first++) all_rows<1>(row, first, nullptr);
  }

  // Outputs of the group of rows from `row` on: their inputs are a vector or two, multiplied with a weight at a time.
  template <class Vector, int vectors, int some_outs>
  void column_tile(int64_t row, int64_t first, const Weight* fetched) const {
    constexpr int64_t each = sizeof(Vector) / sizeof(float);
    const Weight* by = weight + first * weight_stride;
    const float* from = columns + row * width;
    Vector sums[some_outs][vectors] = {};
    for (int64_t i = 0; i < width; i++, from += vectors * each) {
      if (fetches_columns && fetched && i % lanes == 0)
        for (int one = 0; one < some_outs; one++) __builtin_prefetch(fetched + one * weight_stride + i, 0, 2);
      Vector values[vectors];
      for (int v = 0; v < vectors; v++) values[v] = load<Vector>(from + v * each);
      for (int one = 0; one < some_outs; one++)
        for (int v = 0; v < vectors; v++) add_product(sums[one][v], values[v], as_float(by[one * weight_stride + i]) + Vector{});
    }
    float found[some_outs][vectors * each];
    std::memcpy(found, sums, sizeof(found));
    const int64_t count = std::min(rows - row, vectors * each);
    for (int64_t other = 0; other < count; other++)
      for (int one = 0; one < some_outs; one++) put(row + other, first + one, found[one][other]);
  }

  template <class Vector, int vectors>
  void columns_of_tile(int64_t row, int64_t first, int64_t end) const {
    constexpr int at_once = lanes == 16 || vectors == 1 ? 8 : 6;
    for (; first + at_once <= end; first += at_once) {
      const int64_t next = first + outs_of_tile;
      const bool fetches = row == 0 && next + at_once <= outs;
      column_tile<Vector, vectors, at_once>(row, first, fetches ? weight + next * weight_stride : nullptr);
    }
    for (; first < end; first++) column_tile<Vector, vectors, 1>(row, first, nullptr);
  }

  int64_t shares() const { return (outs + outs_of_tile - 1) / outs_of_tile; }

  // With more rows, taking a share costs more than it saves.
  bool has_small_shares() const { return rows == 1; }

  // One output of one row. Its weights are one stream, which AMD Zen 4 reads ahead better than four.
  float dot(const Weight* by) const {
    constexpr int at_once = 4;
    Lanes sums[at_once] = {};
    int64_t i = 0;
    for (; i + at_once * lanes <= width; i += at_once * lanes)
      for (int one = 0; one < at_once; one++) {
        const int64_t at = i + one * lanes;
        if (one * lanes * sizeof(Weight) % bytes_of_line == 0) fetch_ahead(by + at);
        sums[one] += load(input + at) * floats(by + at);
      }
    for (; i + lanes <= width; i += lanes) sums[0] += load(input + i) * floats(by + i);
    float found = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) found += input[i] * as_float(by[i]);
    return found;
  }

  void compute(int64_t from, int64_t to) const {
    int64_t first = from * outs_of_tile;
    const int64_t end = std::min(to * outs_of_tile, outs);
    if (rows == 1) {
      if (full_width || lanes == 8)
        for (; first + streams <= end; first += streams) {
          const bool fetches = sizeof(Weight) < sizeof(float) && first + 2 * streams <= outs;
          tile<1, streams>(0, first, fetches ? weight + (first + streams) * weight_stride : nullptr);
        }
      for (; first < end; first++) put(0, first, dot(weight + first * weight_stride));
      return;
    }
    if (!columns) return by_rows(0, first, end);
    if constexpr (!std::is_same_v<Weight, float>) return with_floats(first, end);
    const int64_t count = rows_as_columns(rows);
    for (; first < end; first += outs_of_tile) {  // whose weights come from memory once, for all rows
      const int64_t last = std::min(first + outs_of_tile, end);
      by_columns(count, first, last);
      if (count < rows) by_rows(count, first, last);
    }
  }

  // The outputs from `first` to `end`, whose weights are widened once for all rows, as many as stay in a core's cache.
  void with_floats(int64_t first, int64_t end) const {
    const std::unique_ptr<float[]> wide(new float[outs_of_tile * width]);
    for (; first < end; first += outs_of_tile) {
      const int64_t count = std::min<int64_t>(outs_of_tile, end - first);
      for (int64_t one = 0; one < count; one++)
        widen(weight + (first + one) * weight_stride, width, wide.get() + one * width);
      Product<float, Element>{input, wide.get(), bias ? bias + first : nullptr, out + first, rows, count, width,
                              input_stride, width, out_stride, columns}
          .compute(0, 1);
    }
  }

  void by_columns(int64_t count, int64_t first, int64_t end) const {
    for (int64_t row = 0, size; row < count; row += size) {
      size = group_at(row, count);
      if (size == 32)
        columns_of_tile<Lanes, 32 / lanes>(row, first, end);
      else if (size == 16)
        columns_of_tile<Lanes, 16 / lanes>(row, first, end);
      else
        columns_of_tile<Eight, 1>(row, first, end);
    }
  }
};

// The first rows as groups [width, rows of the group]; null if none are columns.
std::unique_ptr<float[]> columns_of(const Rows& input) {
  const int64_t rows = rows_as_columns(input.count), width = input.width;
  if (rows == 0) return nullptr;
  std::unique_ptr<float[]> columns(new float[width * lanes_for(rows)]);
  torch::stable::parallel_for(0, (rows + most_of_group - 1) / most_of_group, 1, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * most_of_group, rows);
    for (int64_t row = begin * most_of_group, size; row < last; row += size) {
      size = group_at(row, rows);
      const float* from = input.values + row * input.stride;
      transpose(from, input.stride, std::min(size, rows - row), width, columns.get() + row * width, size);
    }
  });
  return columns;
}

}  // namespace
