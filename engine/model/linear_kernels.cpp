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

// Products of the same input, in one parallel region. Threads take shares of the outputs in turn: the one that memory or
// other processes delay takes fewer of them.
template <class Any>
void compute(const std::vector<Any>& products) {
  int64_t tiles = 0;
  bool has_small_shares = false;
  for (const Any& product : products) tiles += product.tiles(), has_small_shares = product.has_small_shares();
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t share = has_small_shares ? std::max<int64_t>(1, tiles / (8 * threads)) : (tiles + threads - 1) / threads;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, tiles), 1, [&](int64_t, int64_t) {
    for (int64_t from; (from = next.fetch_add(share, std::memory_order_relaxed)) < tiles;) {
      int64_t to = std::min(from + share, tiles);
      for (const Any& product : products) {
        const int64_t own = product.tiles();
        if (from < own && to > 0) product.compute(std::max<int64_t>(from, 0), std::min(to, own));
        from -= own, to -= own;
      }
    }
  });
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

// The outputs [..., all] for an input [..., width], by `compute(rows, out)` for some rows at a time.
template <class Compute>
Tensor product(const Tensor& input, int64_t all, Compute compute) {
  constexpr int64_t most_at_once = 512;  // copies of more rows would take much memory
  const int64_t axes = input.dim(), width = input.size(axes - 1), rows = width ? input.numel() / width : 0;
  check_contiguous(input);
  STD_TORCH_CHECK(axes == 2 || input.is_contiguous(), "an input of more axes than two has to be contiguous");
  const auto sizes_in = input.sizes();
  std::vector<int64_t> sizes(sizes_in.begin(), sizes_in.end());
  sizes.back() = all;
  Tensor out = torch::stable::new_empty(input, sizes);
  const int64_t stride = axes == 2 ? input.stride(0) : width;
  for (int64_t row = 0; row < rows; row += most_at_once)
    compute(Rows{values_of<float>(input) + row * stride, std::min(most_at_once, rows - row), width, stride},
            static_cast<float*>(out.data_ptr()) + row * all);
  return out;
}

// scales: none, or those of each weight.
template <class Weight>
Tensor plain_product(const Tensor& input, const std::vector<Tensor>& weights, const std::vector<Tensor>& scales) {
  const int64_t all = outs_of(weights), width = input.size(input.dim() - 1);
  for (const Tensor& weight : weights) {
    check_contiguous(weight);
    STD_TORCH_CHECK(weight.size(1) == width, "the inputs are ", width, " wide, and the weights ", weight.size(1));
  }
  return product(input, all, [&](const Rows& rows, float* out) {
#ifdef HAS_MATRIX_UNITS
    if constexpr (sizeof(Weight) == 1)
      if (rows.count >= EightBits::least_rows && has_matrix_units()) {
        const InputTiles tiles(rows, width);
        std::vector<EightBits> products;
        for (size_t i = 0; i < weights.size(); i++) {
          products.push_back({&tiles, values_of<int8_t>(weights[i]), values_of<float>(scales[i]), out, weights[i].size(0),
                              weights[i].stride(0), all});
          out += weights[i].size(0);
        }
        return compute(products);
      }
#endif
    std::unique_ptr<float[]> columns;
    if (sizeof(Weight) == sizeof(float)) columns = columns_of(rows);
    std::vector<Product<Weight>> products;
    for (size_t i = 0; i < weights.size(); i++) {
      products.push_back({rows.values, values_of<Weight>(weights[i]), scales.empty() ? nullptr : values_of<float>(scales[i]),
                          out, rows.count, weights[i].size(0), width, rows.stride, weights[i].stride(0), all,
                          columns.get()});
      out += weights[i].size(0);
    }
    compute(products);
  });
}

Tensor linears(Tensor input, std::vector<Tensor> weights) { return plain_product<float>(input, weights, {}); }

Tensor int8_linears(Tensor input, std::vector<Tensor> codes, std::vector<Tensor> scales) {
  return plain_product<int8_t>(input, codes, scales);
}

Tensor int4_linears(Tensor input, std::vector<Tensor> packed, std::vector<Tensor> scales, int64_t outs_of_block) {
  const int64_t all = outs_of(packed), width = input.size(1), group = width / scales[0].size(0);
  for (const Tensor& one : scales)
    STD_TORCH_CHECK(one.size(0) * group == width && group % 2 == 0, "groups have an even number of inputs");
  return product(input, all, [&](const Rows& rows, float* out) {
    STD_TORCH_CHECK(rows.count == 1 || rows.stride == width, "the rows of the input have to follow each other");
    std::unique_ptr<Panels> panels;
    std::unique_ptr<InputTiles> tiles;
#ifdef HAS_MATRIX_UNITS
    if (FourBits::fit_units(rows.count, outs_of_block, group)) tiles = std::make_unique<InputTiles>(rows, group);
#endif
    if (!tiles && FourBits::fit_panels(rows.count, outs_of_block)) panels = std::make_unique<Panels>(rows);
    std::vector<FourBits> products;
    for (size_t i = 0; i < packed.size(); i++) {
      products.push_back({rows.values, values_of<uint8_t>(packed[i]), values_of<uint16_t>(scales[i]), out, rows.count,
                          packed[i].size(0), width, group, all, outs_of_block / lanes / 2, panels.get(), tiles.get()});
      out += packed[i].size(0);
    }
    compute(products);
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
