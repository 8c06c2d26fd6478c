// Products with the weights of a linear layer. With few rows they are read once, at memory bandwidth.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in 2 s, ATen's headers in 7 s
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "handles.h"
#include "products/blocks.h"
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

int64_t rows_of(Borrowed input) {
  const int64_t width = input.size(input.dim() - 1);
  return width ? input.numel() / width : 0;
}

int64_t outs_of(const std::vector<Borrowed>& weights) {
  int64_t outs = 0;
  for (Borrowed weight : weights) outs += weight.size(0);
  return outs;
}

void check_contiguous(Borrowed of) {
  const int64_t last = of.dim() - 1;
  STD_TORCH_CHECK(of.size(last) == 1 || of.stride(last) == 1, "the width of inputs and weights has to be contiguous");
}

// The outputs [..., all] for an input [..., width] of the same elements, by `compute_rows(rows, out)` for `at_once` rows
// or less. If there are pieces for all threads, each computes some of them: its part of the input stays in the cache of
// its core.
template <class Element, class Compute>
Tensor product(Borrowed input, int64_t all, int64_t at_once, Compute compute_rows) {
  const int64_t axes = input.dim(), width = input.size(axes - 1), rows = rows_of(input);
  check_contiguous(input);
  STD_TORCH_CHECK(width > 0, "the input has a width of 0");
  STD_TORCH_CHECK(axes == 2 || input.is_contiguous(), "an input of more axes than two has to be contiguous");
  std::vector<int64_t> sizes(axes, all);
  for (int64_t axis = 0; axis < axes - 1; axis++) sizes[axis] = input.size(axis);
  const Tensor out = empty_of(input.type(), sizes);
  const int64_t stride = axes == 2 ? input.stride(0) : width, threads = torch::stable::get_num_threads();
  if (rows == 0) return out;
  int64_t pieces = (rows + at_once - 1) / at_once;
  const bool by_pieces = pieces >= threads;
  if (by_pieces) pieces = (pieces + threads - 1) / threads * threads;
  const auto compute_some = [&](int64_t begin, int64_t end) {
    for (int64_t row = rows * begin / pieces, next; begin < end; row = next) {
      next = rows * ++begin / pieces;
      const Element* from = input.values<Element>() + row * stride;
      Element* to = Borrowed(out).values<Element>() + row * all;
      if constexpr (std::is_same_v<Element, float>) {
        compute_rows(Rows{from, next - row, width, stride, by_pieces ? 1 : threads}, to);
      } else {
        const std::unique_ptr<float[]> wide(new float[(next - row) * width]);
        for (int64_t i = 0; i < next - row; i++) widen(from + i * stride, width, wide.get() + i * width);
        compute_rows(Rows{wide.get(), next - row, width, width, by_pieces ? 1 : threads}, to);
      }
    }
  };
  if (by_pieces)
    torch::stable::parallel_for(0, pieces, 1, compute_some);
  else
    compute_some(0, pieces);
  return out;
}

// biases: of all weights, or none.
void check_weights(Borrowed input, const std::vector<Borrowed>& weights, const std::vector<Borrowed>& biases) {
  const int64_t width = input.size(input.dim() - 1);
  STD_TORCH_CHECK(biases.empty() || biases.size() == weights.size(), "all weights have a bias, or none has");
  for (size_t i = 0; i < weights.size(); i++) {
    check_contiguous(weights[i]);
    STD_TORCH_CHECK(weights[i].dim() == 2 && weights[i].size(1) == width, "the inputs are ", width,
                    " wide, and the weights ", weights[i].size(1));
    STD_TORCH_CHECK(weights[i].type() == input.type() && (biases.empty() || biases[i].type() == input.type()),
                    "inputs, weights and biases have to be of one data type");
    STD_TORCH_CHECK(biases.empty() || (biases[i].is_contiguous() && biases[i].numel() == weights[i].size(0)),
                    "a bias has to be contiguous, with an element for each output");
  }
}

template <class Element>
Tensor linears_in(Borrowed input, const std::vector<Borrowed>& weights, const std::vector<Borrowed>& biases) {
  const int64_t all = outs_of(weights), width = input.size(input.dim() - 1);
  return product<Element>(input, all, most_rows, [&](const Rows& rows, Element* out) {
    const std::unique_ptr<float[]> columns = columns_of(rows);
    std::vector<Product<Element>> products;
    for (size_t i = 0; i < weights.size(); i++) {
      const int64_t outs = weights[i].size(0);
      products.push_back({rows.values, weights[i].values<Element>(), biases.empty() ? nullptr : biases[i].values<Element>(),
                          out, rows.count, outs, width, rows.stride, weights[i].stride(0), all, columns.get()});
      out += outs;
    }
    compute(rows, products);
  });
}

Tensor linears_of(Borrowed input, const std::vector<Borrowed>& weights, const std::vector<Borrowed>& biases) {
  check_weights(input, weights, biases);
  STD_TORCH_CHECK(type_of(input) != Type::none, "inputs are float32, bfloat16 or float16");
  std::optional<Tensor> out;
  with_element(type_of(input), [&](auto element) { out = linears_in<decltype(element)>(input, weights, biases); });
  return *out;
}

// factors: null for none.
BlockCodes block_codes(Borrowed codes, Borrowed scales, const Borrowed* factors) {
  for (Borrowed tensor : {codes, scales, factors ? *factors : codes})
    STD_TORCH_CHECK(tensor.is_contiguous(), "codes, scales and factors have to be contiguous");
  STD_TORCH_CHECK(codes.dim() == 3 && codes.size(2) % 64 == 0, "codes of blocks have three axes");
  const int64_t blocks = codes.size(0), groups = codes.size(1), bits = codes.size(2) / 64;
  const auto are_of = [&](Borrowed of, int64_t places) {
    return of.dim() == 4 && of.size(0) == blocks && of.size(1) == places && of.size(3) == block_outs;
  };
  STD_TORCH_CHECK(!factors || (are_of(*factors, groups) && (factors->size(2) == 0 || factors->size(2) == 2)),
                  "codes and factors are of different blocks");
  const bool has_factors = factors && factors->size(2) == 2;
  STD_TORCH_CHECK(!has_factors || groups % groups_of_scale == 0, "scales with factors are of 256 inputs");
  STD_TORCH_CHECK(are_of(scales, has_factors ? groups / groups_of_scale : groups), "scales are of different blocks");
  STD_TORCH_CHECK(scales.size(2) == 1 || scales.size(2) == 2, "an output has a scale, or a scale and a least value");
  const bool has_least = scales.size(2) == 2;
  STD_TORCH_CHECK(!has_factors || has_least || bits == bits_of_halves, "codes of ", bits, " bits with scales of halves");
  const int8_t* by = has_factors ? factors->values<int8_t>() : nullptr;
  return {static_cast<int>(bits), codes.values<uint8_t>(), scales.values<Float16>(), by, blocks, groups, has_least};
}

BlockCodes block_codes(const Tensor& codes, const Tensor& scales, const Tensor& factors) {
  const Borrowed of_scales = factors;
  return block_codes(Borrowed(codes), Borrowed(scales), &of_scales);
}

// With fewer rows the processor's other instructions are faster.
bool fit_units(int64_t rows) { return rows >= 16 && has_matrix_units(); }

// The rows times a factor per input, in memory of their own.
class ScaledRows {
 public:
  ScaledRows(const Rows& rows, const float* by) : values_(new float[rows.count * rows.width]), rows_(rows) {
    rows_.values = values_.get(), rows_.stride = rows.width;
    for (int64_t row = 0; row < rows.count; row++)
      for (int64_t i = 0; i < rows.width; i++)
        values_[row * rows.width + i] = rows.values[row * rows.stride + i] * by[i];
  }

  const Rows& rows() const { return rows_; }

 private:
  std::unique_ptr<float[]> values_;
  Rows rows_;
};

// Inputs in the form that products with codes take.
struct CodedInput {
  std::unique_ptr<InputTiles> tiles;
  std::unique_ptr<BlockInput> blocks;

  CodedInput(const Rows& rows, bool by_units, int parts) {
#ifdef HAS_MATRIX_UNITS
    if (by_units) tiles = std::make_unique<InputTiles>(rows);
#endif
    if (!tiles) blocks = std::make_unique<BlockInput>(rows, parts);
  }
};

Tensor block_linears_of(Borrowed input, const std::vector<Borrowed>& codes, const std::vector<Borrowed>& scales,
                        const std::vector<Borrowed>& factors, const std::vector<Borrowed>& input_scales,
                        int parts) {
  STD_TORCH_CHECK(input.is_float(), "inputs of products with codes are float32");
  const size_t count = codes.size();
  const auto are_of_some = [&](const std::vector<Borrowed>& tensors) {
    return tensors.empty() || tensors.size() == count;
  };
  STD_TORCH_CHECK(count && count == scales.size() && are_of_some(factors) && are_of_some(input_scales),
                  "weights have codes and scales, and all or none of them factors and scales of inputs");
  const int64_t width = input.size(input.dim() - 1), groups = (width + block_inputs - 1) / block_inputs;
  std::vector<BlockCodes> weights;
  std::vector<const float*> scales_of_inputs(count);
  for (size_t i = 0; i < count; i++) {
    weights.push_back(block_codes(codes[i], scales[i], factors.empty() ? nullptr : &factors[i]));
    STD_TORCH_CHECK(weights[i].groups == groups, "the inputs are ", width, " wide, and the weights ",
                    weights[i].groups * block_inputs);
    const int64_t scaled = input_scales.empty() ? 0 : input_scales[i].numel();
    if (scaled == 0) continue;
    STD_TORCH_CHECK(input_scales[i].is_contiguous() && scaled == groups * block_inputs,
                    "scales of ", scaled, " inputs, and weights for ", groups * block_inputs);
    scales_of_inputs[i] = input_scales[i].values<float>();
  }
  const bool by_units = fit_units(rows_of(input));
  const int64_t at_once = by_units ? InputTiles::most_rows : BlockInput::most_rows;
  return product<float>(input, outs_of(codes) * block_outs, at_once, [&](const Rows& rows, float* out) {
    std::vector<CodedInput> inputs;
    inputs.reserve(count);
    const CodedInput* unscaled = nullptr;  // shared
    std::vector<BlockProduct> products;
    for (size_t i = 0; i < count; i++) {
      const CodedInput* of = unscaled;
      if (scales_of_inputs[i]) {
        of = &inputs.emplace_back(ScaledRows(rows, scales_of_inputs[i]).rows(), by_units, parts);
      } else if (!of) {
        of = unscaled = &inputs.emplace_back(rows, by_units, parts);
      }
      products.push_back({weights[i], of->blocks.get(), of->tiles.get(), out, outs_of(codes) * block_outs});
      out += weights[i].blocks * block_outs;
    }
    compute(rows, products);
  });
}

Tensor block_weights(Tensor codes, Tensor scales, Tensor factors) {
  const BlockCodes weights = block_codes(codes, scales, factors);
  const Tensor out = empty_floats({weights.blocks * block_outs, weights.groups * block_inputs});
  with_bits(weights.bits, [&](auto bits) { decode_blocks<bits>(weights, Borrowed(out).values<float>()); });
  return out;
}

Tensor block_rows(Tensor codes, Tensor scales, Tensor factors, Tensor outs) {
  const BlockCodes weights = block_codes(codes, scales, factors);
  const int64_t count = outs.numel(), width = weights.groups * block_inputs;
  STD_TORCH_CHECK(outs.is_contiguous() && outs.scalar_type() == torch::headeronly::ScalarType::Long,
                  "outputs are int64, and contiguous");
  const int64_t* elements = Borrowed(outs).values<int64_t>();
  for (int64_t i = 0; i < count; i++)
    STD_TORCH_CHECK(elements[i] >= 0 && elements[i] < weights.blocks * block_outs, "output ", elements[i], " of ",
                    weights.blocks * block_outs);
  std::vector<int64_t> sizes(outs.dim() + 1, width);
  for (int64_t axis = 0; axis < outs.dim(); axis++) sizes[axis] = outs.size(axis);
  const Tensor rows = empty_floats(sizes);
  with_bits(weights.bits, [&](auto bits) { decode_rows<bits>(weights, elements, count, Borrowed(rows).values<float>()); });
  return rows;
}

void encode_weights(Tensor weight, Tensor codes, Tensor scales, Tensor factors) {
  const BlockCodes blocks = block_codes(codes, scales, factors);
  STD_TORCH_CHECK(blocks.has_least && !blocks.factors && weight.is_contiguous(), "a scale and a least value per group");
  STD_TORCH_CHECK(weight.size(0) == blocks.blocks * block_outs && weight.size(1) == blocks.groups * block_inputs,
                  "weights of other blocks");
  with_bits(blocks.bits, [&](auto bits) {
    encode_blocks<bits>(Borrowed(weight).values<float>(), blocks.blocks, blocks.groups,
                        Borrowed(codes).values<uint8_t>(), Borrowed(scales).values<Float16>());
  });
}

Tensor linears(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases) {
  return linears_of(input, borrowed(weights), borrowed(biases));
}

template <int parts>
Tensor block_linears(Tensor input, std::vector<Tensor> codes, std::vector<Tensor> scales, std::vector<Tensor> factors,
                     std::vector<Tensor> input_scales) {
  return block_linears_of(input, borrowed(codes), borrowed(scales), borrowed(factors), borrowed(input_scales), parts);
}

bool matrix_units() { return has_matrix_units(); }

bool integer_products() { return BlockInput::has_integers; }

}  // namespace

// Products of one input [..., width] with several weights -> their outputs side by side, [..., all] of its data type.
//
// `linears`: input, weights [outs, width] with a contiguous width, and biases [outs], of all weights or none, are of one
// data type: float32, bfloat16 or float16.
//
// `block_linears`: the input is float32. codes, scales, factors: see `BlockCodes`, with no factors
// [outs / 16, width / 32, 0, 16]. input_scales: float32 [width, filled up to groups of 32], or of no elements; inputs are
// multiplied with them. Lists of factors and of scales of inputs are empty where no weights have any.
// `rounded_block_linears`: as integers, inputs are rounded to 8 bits, with a scale for each 32 of a row.
STABLE_TORCH_LIBRARY(kvengine, library) {
  library.def("linears(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor");
  for (const char* name : {"block_linears", "rounded_block_linears"})
    library.def((std::string(name) + "(Tensor input, Tensor[] codes, Tensor[] scales, Tensor[] factors, "
                                     "Tensor[] input_scales) -> Tensor").c_str());
  // In full, float32 [outs, width], and those of some outputs, int64 [...]: float32 [..., width].
  library.def("block_weights(Tensor codes, Tensor scales, Tensor factors) -> Tensor");
  library.def("block_rows(Tensor codes, Tensor scales, Tensor factors, Tensor outs) -> Tensor");
  library.def("encode_weights(Tensor weight, Tensor(a!) codes, Tensor(b!) scales, Tensor factors) -> ()");
  library.def("matrix_units() -> bool");      // whether many rows are multiplied with codes by them
  library.def("integer_products() -> bool");  // whether few are as integers
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CompositeExplicitAutograd, library) {
  library.impl("matrix_units", TORCH_BOX(&matrix_units));
  library.impl("integer_products", TORCH_BOX(&integer_products));
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("linears", TORCH_BOX(&linears));
  library.impl("block_linears", TORCH_BOX(&block_linears<exact_parts>));
  library.impl("rounded_block_linears", TORCH_BOX(&block_linears<rounded_parts>));
  library.impl("block_weights", TORCH_BOX(&block_weights));
  library.impl("block_rows", TORCH_BOX(&block_rows));
  library.impl("encode_weights", TORCH_BOX(&encode_weights));
}

extern "C" {

AOTITorchError aoti_torch_cpu_linears(AtenTensorHandle input, const AtenTensorHandle* weights, int64_t of_weights,
                                      const AtenTensorHandle* biases, int64_t of_biases, AtenTensorHandle* out) {
  return hand_over(linears_of(input, borrowed(weights, of_weights), borrowed(biases, of_biases)), out);
}

AOTITorchError aoti_torch_cpu_block_linears(AtenTensorHandle input, const AtenTensorHandle* codes, int64_t of_codes,
                                            const AtenTensorHandle* scales, int64_t of_scales,
                                            const AtenTensorHandle* factors, int64_t of_factors,
                                            const AtenTensorHandle* input_scales, int64_t of_input_scales,
                                            AtenTensorHandle* out) {
  return hand_over(block_linears_of(input, borrowed(codes, of_codes), borrowed(scales, of_scales),
                                    borrowed(factors, of_factors), borrowed(input_scales, of_input_scales),
                                    exact_parts), out);
}

AOTITorchError aoti_torch_cpu_rounded_block_linears(AtenTensorHandle input, const AtenTensorHandle* codes,
                                                    int64_t of_codes, const AtenTensorHandle* scales,
                                                    int64_t of_scales, const AtenTensorHandle* factors,
                                                    int64_t of_factors, const AtenTensorHandle* input_scales,
                                                    int64_t of_input_scales, AtenTensorHandle* out) {
  return hand_over(block_linears_of(input, borrowed(codes, of_codes), borrowed(scales, of_scales),
                                    borrowed(factors, of_factors), borrowed(input_scales, of_input_scales),
                                    rounded_parts), out);
}

}  // extern "C"
