// Products with the weights of a linear layer. With few rows they are read once, at memory bandwidth.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in 2 s, ATen's headers in 7 s
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "products/eight_bits.h"
#include "products/four_bits.h"
#include "products/plain.h"

namespace {

using torch::stable::Tensor;

// Products of the same rows, in one parallel region. Threads take shares of the outputs in turn: the one that memory or
// other processes delay takes fewer of them.
template <class Any>
void compute(const Rows& rows, const std::vector<Any>& products) {
  int64_t shares = 0;
  bool are_small = false;
  for (const Any& product : products) shares += product.shares(), are_small = product.has_small_shares();
  const int64_t threads = rows.threads;
  const int64_t at_once = are_small ? std::max<int64_t>(1, shares / (8 * threads)) : (shares + threads - 1) / threads;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, shares), 1, [&](int64_t, int64_t) {
    for (int64_t from; (from = next.fetch_add(at_once, std::memory_order_relaxed)) < shares;) {
      int64_t to = std::min(from + at_once, shares);
      for (const Any& product : products) {
        const int64_t own = product.shares();
        if (from < own && to > 0) product.compute(std::max<int64_t>(from, 0), std::min(to, own));
        from -= own, to -= own;
      }
    }
  });
}

constexpr int64_t most_rows = 512;  // at once: copies of more would take much memory

int64_t rows_of(const Tensor& input) {
  const int64_t width = input.size(input.dim() - 1);
  return width ? input.numel() / width : 0;
}

int64_t outs_of(const std::vector<Tensor>& weights) {
  int64_t outs = 0;
  for (const Tensor& weight : weights) outs += weight.size(0);
  return outs;
}

void check_contiguous(const Tensor& of) {
  const int64_t last = of.dim() - 1;
  STD_TORCH_CHECK(of.size(last) == 1 || of.stride(last) == 1, "the width of inputs and weights has to be contiguous");
}

template <class Value>
const Value* values_of(const Tensor& tensor) {
  return static_cast<const Value*>(tensor.data_ptr());
}

// The outputs [..., all] for an input [..., width], by `compute_rows(rows, out)` for `at_once` rows or less. If there are
// pieces for all threads, each computes some of them: its part of the input stays in the cache of its core.
template <class Compute>
Tensor product(const Tensor& input, int64_t all, int64_t at_once, Compute compute_rows) {
  const int64_t axes = input.dim(), width = input.size(axes - 1), rows = rows_of(input);
  check_contiguous(input);
  STD_TORCH_CHECK(axes == 2 || input.is_contiguous(), "an input of more axes than two has to be contiguous");
  const auto sizes_in = input.sizes();
  std::vector<int64_t> sizes(sizes_in.begin(), sizes_in.end());
  sizes.back() = all;
  Tensor out = torch::stable::new_empty(input, sizes);
  const int64_t stride = axes == 2 ? input.stride(0) : width, threads = torch::stable::get_num_threads();
  if (rows == 0) return out;
  int64_t pieces = (rows + at_once - 1) / at_once;
  const bool by_pieces = pieces >= threads;
  if (by_pieces) pieces = (pieces + threads - 1) / threads * threads;
  const auto compute_some = [&](int64_t begin, int64_t end) {
    for (int64_t row = rows * begin / pieces, next; begin < end; row = next) {
      next = rows * ++begin / pieces;
      const float* from = values_of<float>(input) + row * stride;
      float* to = static_cast<float*>(out.data_ptr()) + row * all;
      compute_rows({from, next - row, width, stride, by_pieces ? 1 : threads}, to);
    }
  };
  if (by_pieces)
    torch::stable::parallel_for(0, pieces, 1, compute_some);
  else
    compute_some(0, pieces);
  return out;
}

void check_widths(const Tensor& input, const std::vector<Tensor>& weights) {
  const int64_t width = input.size(input.dim() - 1);
  for (const Tensor& weight : weights) {
    check_contiguous(weight);
    STD_TORCH_CHECK(weight.size(1) == width, "the inputs are ", width, " wide, and the weights ", weight.size(1));
  }
}

// scales: none, or those of each weight.
template <class Weight>
Tensor plain_product(const Tensor& input, const std::vector<Tensor>& weights, const std::vector<Tensor>& scales) {
  const int64_t all = outs_of(weights), width = input.size(input.dim() - 1);
  return product(input, all, most_rows, [&](const Rows& rows, float* out) {
    std::unique_ptr<float[]> columns;
    if (sizeof(Weight) == sizeof(float)) columns = columns_of(rows);
    std::vector<Product<Weight>> products;
    for (size_t i = 0; i < weights.size(); i++) {
      const float* of_outs = scales.empty() ? nullptr : values_of<float>(scales[i]);
      products.push_back({rows.values, values_of<Weight>(weights[i]), of_outs, out, rows.count, weights[i].size(0), width,
                          rows.stride, weights[i].stride(0), all, columns.get()});
      out += weights[i].size(0);
    }
    compute(rows, products);
  });
}

Tensor linears(Tensor input, std::vector<Tensor> weights) {
  check_widths(input, weights);
  return plain_product<float>(input, weights, {});
}

Tensor int8_linears(Tensor input, std::vector<Tensor> codes, std::vector<Tensor> scales) {
  check_widths(input, codes);
#ifdef HAS_MATRIX_UNITS
  if (rows_of(input) >= EightBits::least_rows && has_matrix_units()) {
    const int64_t all = outs_of(codes);
    return product(input, all, InputTiles::most_rows, [&](const Rows& rows, float* out) {
      const InputTiles tiles(rows, rows.width);
      std::vector<EightBits> products;
      for (size_t i = 0; i < codes.size(); i++) {
        products.push_back({&tiles, values_of<int8_t>(codes[i]), values_of<float>(scales[i]), out, codes[i].size(0),
                            codes[i].stride(0), all});
        out += codes[i].size(0);
      }
      compute(rows, products);
    });
  }
#endif
  return plain_product<int8_t>(input, codes, scales);
}

Tensor int4_linears(Tensor input, std::vector<Tensor> packed, std::vector<Tensor> scales, int64_t outs_of_block) {
  const int64_t rows = rows_of(input), width = input.size(1), all = outs_of(packed);
  STD_TORCH_CHECK(rows == 1 || input.stride(0) == width, "the rows of the input have to follow each other");
  STD_TORCH_CHECK(packed.size() == scales.size() && !packed.empty(), "weights have codes and scales");
  const int64_t group = width / scales[0].size(0);
  for (size_t i = 0; i < packed.size(); i++) {
    const int64_t in = 2 * packed[i].size(1), outs = packed[i].size(0);
    STD_TORCH_CHECK(in == width, "the inputs are ", width, " wide, and the weights ", in);
    STD_TORCH_CHECK(scales[i].size(1) == outs, outs, " outputs have codes, and ", scales[i].size(1), " scales");
    STD_TORCH_CHECK(scales[i].size(0) * group == width && group % 2 == 0, "groups have an even number of inputs");
  }
  const bool by_units = FourBits::fit_units(rows, outs_of_block, group);
  const bool by_panels = !by_units && FourBits::fit_panels(rows);
  return product(input, all, by_units ? InputTiles::most_rows : Panels::most_rows, [&](const Rows& rows, float* out) {
    std::unique_ptr<Panels> panels;
    std::unique_ptr<InputTiles> tiles;
#ifdef HAS_MATRIX_UNITS
    if (by_units) tiles = std::make_unique<InputTiles>(rows, group);
#endif
    if (by_panels) panels = std::make_unique<Panels>(rows);
    std::vector<FourBits> products;
    for (size_t i = 0; i < packed.size(); i++) {
      products.push_back({rows.values, values_of<uint8_t>(packed[i]), values_of<uint16_t>(scales[i]), out, rows.count,
                          packed[i].size(0), width, group, all, outs_of_block / lanes / 2, panels.get(), tiles.get()});
      out += packed[i].size(0);
    }
    compute(rows, products);
  });
}

bool matrix_units() { return has_matrix_units(); }

}  // namespace

// Products of one input float32 [..., width] with several weights -> their outputs side by side, float32 [..., all]. With
// codes of 4 bits the input is [rows, width].
// weights: float32 or codes int8 [outs, width], all with a contiguous width; scales: float32 [outs]. packed, scales of 4
// bits: see `FourBits`.
STABLE_TORCH_LIBRARY(kvengine, library) {
  library.def("linears(Tensor input, Tensor[] weights) -> Tensor");
  library.def("int8_linears(Tensor input, Tensor[] codes, Tensor[] scales) -> Tensor");
  library.def("int4_linears(Tensor input, Tensor[] packed, Tensor[] scales, int outs_of_block) -> Tensor");
  library.def("matrix_units() -> bool");  // whether codes are multiplied by them
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CompositeExplicitAutograd, library) {
  library.impl("matrix_units", TORCH_BOX(&matrix_units));
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("linears", TORCH_BOX(&linears));
  library.impl("int8_linears", TORCH_BOX(&int8_linears));
  library.impl("int4_linears", TORCH_BOX(&int4_linears));
}
