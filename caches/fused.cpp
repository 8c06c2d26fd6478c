// Products of attention with columns that are written down as codes. Nothing is unpacked beyond a column.
//
// codes [rows, heads, columns, bytes]; byte i of a column holds the channels i, i + bytes, ..., lowest bits first.
// scale, offset [rows, heads, columns, groups] of neighbouring channels, or [rows, heads, blocks, width] of `block`
// columns; then block > 0. The last block may be cut off. Everything but the codes is float32, the innermost dimension
// of everything is contiguous.

#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <algorithm>
#include <vector>

namespace {

struct Columns {
  const uint8_t* codes;
  const float* scale;
  const float* offset;  // nullptr: none
  int64_t codes_stride, scale_stride;
  int64_t count, bytes, groups, block;
};

Columns of_head(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                int64_t block, int64_t row, int64_t head) {
  Columns found;
  found.codes = codes.const_data_ptr<uint8_t>() + row * codes.stride(0) + head * codes.stride(1);
  found.scale = scale.const_data_ptr<float>() + row * scale.stride(0) + head * scale.stride(1);
  found.offset = nullptr;
  if (offset) {
    TORCH_CHECK(offset->strides() == scale.strides(), "scale and offset lie in memory alike");
    found.offset = offset->const_data_ptr<float>() + row * scale.stride(0) + head * scale.stride(1);
  }
  found.codes_stride = codes.stride(2);
  found.scale_stride = scale.stride(2);
  found.count = codes.size(2);
  found.bytes = codes.size(3);
  found.groups = block ? 1 : scale.size(3);
  found.block = block;
  return found;
}

// Loops of a length that the compiler knows are several times faster: `known` is the width, or 0 for any.
template <int bits, int known>
inline void unpack(const uint8_t* packed, int64_t any_bytes, float* numbers) {
  const int64_t bytes = known ? known * bits / 8 : any_bytes;
  for (int plane = 0; plane < 8 / bits; plane++) {
    float* target = numbers + plane * bytes;
    for (int64_t i = 0; i < bytes; i++) target[i] = (float)((packed[i] >> (bits * plane)) & ((1 << bits) - 1));
  }
}

template <int known>
inline float dot(const float* a, const float* b, int64_t any) {
  const int64_t count = known ? known : any;
  float sum = 0;
  for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

inline float total(const float* a, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; i++) sum += a[i];
  return sum;
}

constexpr int64_t most_width = 512;
constexpr int64_t at_once = 3;  // tokens whose sums stay in registers
constexpr int64_t piece = 128;  // columns that stay in the nearest memory while the heads take theirs from them

// queries [tokens, width], out [tokens, columns] of which these are from `begin` to `end`.
template <int bits, int known>
void scores_of_head(const Columns& keys, const float* queries, int64_t tokens, int64_t any_width, float* out,
                    int64_t begin, int64_t end) {
  const int64_t width = known ? known : any_width, group = width / keys.groups;
  alignas(64) float numbers[known ? known : most_width];
  std::vector<float> scaled(tokens * width), constant(tokens * keys.groups);
  if (!keys.block)
    for (int64_t i = 0; i < tokens * keys.groups; i++) constant[i] = total(queries + i * group, group);
  int64_t scaled_block = -1;  // that `scaled` and `constant` are of
  for (int64_t column = begin; column < end; column++) {
    unpack<bits, known>(keys.codes + column * keys.codes_stride, keys.bytes, numbers);
    const int64_t at = (keys.block ? column / keys.block : column) * keys.scale_stride;
    const float *scale = keys.scale + at, *offset = keys.offset ? keys.offset + at : nullptr;
    if (keys.block && column / keys.block != scaled_block) {
      scaled_block = column / keys.block;
      for (int64_t token = 0; token < tokens; token++) {
        const float* query = queries + token * width;
        for (int64_t i = 0; i < width; i++) scaled[token * width + i] = query[i] * scale[i];
        constant[token] = offset ? dot<known>(query, offset, width) : 0;
      }
    }
    for (int64_t token = 0; token < tokens; token++) {
      float sum = 0;
      if (keys.block)
        sum = dot<known>(numbers, scaled.data() + token * width, width) + constant[token];
      else if (keys.groups == 1)
        sum = *scale * dot<known>(numbers, queries + token * width, width) + (offset ? *offset * constant[token] : 0);
      else
        for (int64_t g = 0; g < keys.groups; g++) {
          sum += scale[g] * dot<0>(numbers + g * group, queries + token * width + g * group, group);
          if (offset) sum += offset[g] * constant[token * keys.groups + g];
        }
      out[token * keys.count + column] = sum;
    }
  }
}

// weights [tokens, columns] of `at_once` tokens or fewer, of which the columns from `begin` to `end` are added to
// out [tokens, width]. Every column has one scale.
template <int bits, int known>
void mixed_of_plain_head(const Columns& values, const float* weights, int64_t tokens, int64_t any_width, float* out,
                         int64_t begin, int64_t end) {
  const int64_t width = known ? known : any_width;
  float sums[at_once][known ? known : most_width] = {};
  float constant[at_once] = {};
  for (int64_t column = begin; column < end; column++) {
    float numbers[known ? known : most_width];
    unpack<bits, known>(values.codes + column * values.codes_stride, values.bytes, numbers);
    const float scale = values.scale[column * values.scale_stride];
    const float offset = values.offset ? values.offset[column * values.scale_stride] : 0;
    for (int64_t token = 0; token < at_once; token++) {
      const float weight = token < tokens ? weights[token * values.count + column] : 0;
      const float factor = weight * scale;
      constant[token] += weight * offset;
      for (int64_t i = 0; i < width; i++) sums[token][i] += factor * numbers[i];
    }
  }
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t i = 0; i < width; i++) out[token * width + i] += sums[token][i] + constant[token];
}

// As above, whatever shares the scales. Whole blocks.
template <int bits, int known>
void mixed_of_head(const Columns& values, const float* weights, int64_t tokens, int64_t any_width, float* out,
                   int64_t begin, int64_t end) {
  if (!values.block && values.groups == 1)
    return mixed_of_plain_head<bits, known>(values, weights, tokens, any_width, out, begin, end);
  const int64_t width = known ? known : any_width, group = width / values.groups;
  alignas(64) float numbers[known ? known : most_width];
  alignas(64) float sums[at_once][known ? known : most_width] = {};
  alignas(64) float whole[at_once][known ? known : most_width] = {};  // of blocks that have ended
  float constant[at_once] = {};
  for (int64_t column = begin; column < end; column++) {
    unpack<bits, known>(values.codes + column * values.codes_stride, values.bytes, numbers);
    const int64_t at = (values.block ? column / values.block : column) * values.scale_stride;
    const float *scale = values.scale + at, *offset = values.offset ? values.offset + at : nullptr;
    float factor[at_once] = {};
    for (int64_t token = 0; token < tokens; token++) factor[token] = weights[token * values.count + column];
    if (!values.block && values.groups > 1) {  // then constants are of channels
      for (int64_t g = 0; g < values.groups; g++)
        for (int64_t i = g * group; i < (g + 1) * group; i++)
          numbers[i] = numbers[i] * scale[g] + (offset ? offset[g] : 0);
    } else if (!values.block) {
      for (int64_t token = 0; token < at_once; token++) {
        constant[token] += offset ? factor[token] * *offset : 0;
        factor[token] *= *scale;
      }
    } else {
      for (int64_t token = 0; token < at_once; token++) constant[token] += factor[token];
    }
    for (int64_t token = 0; token < at_once; token++)
      for (int64_t i = 0; i < width; i++) sums[token][i] += factor[token] * numbers[i];
    if (values.block && (column + 1 == end || (column + 1) % values.block == 0)) {
      for (int64_t token = 0; token < at_once; token++) {
        for (int64_t i = 0; i < width; i++) {
          whole[token][i] += sums[token][i] * scale[i] + (offset ? offset[i] * constant[token] : 0);
          sums[token][i] = 0;
        }
        constant[token] = 0;
      }
    }
  }
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t i = 0; i < width; i++)
      out[token * width + i] += values.block ? whole[token][i] : sums[token][i] + constant[token];
}

template <int bits, int known>
at::Tensor scores_with(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                       int64_t block, const at::Tensor& queries) {
  const int64_t rows = codes.size(0), heads = codes.size(1), count = codes.size(2);
  const int64_t tokens = queries.size(2), width = queries.size(3), pieces = (count + piece - 1) / piece;
  auto out = at::empty({rows, heads, tokens, count}, queries.options());
  at::parallel_for(0, rows * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t job = first; job < last; job++) {
      const int64_t row = job / pieces, begin = job % pieces * piece;
      for (int64_t head = 0; head < heads; head++) {
        auto keys = of_head(codes, scale, offset, block, row, head);
        const int64_t at = (row * heads + head) * tokens;
        scores_of_head<bits, known>(keys, queries.const_data_ptr<float>() + at * width, tokens, width,
                                    out.data_ptr<float>() + at * count, begin, std::min(begin + piece, count));
      }
    }
  });
  return out;
}

template <int bits, int known>
at::Tensor mixed_with(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                      int64_t block, const at::Tensor& weights, int64_t width) {
  const int64_t rows = codes.size(0), heads = codes.size(1), count = codes.size(2), tokens = weights.size(2);
  // Every thread sums up a part of the columns, whole blocks of them.
  const int64_t step = block ? (piece + block - 1) / block * block : piece;
  const int64_t pieces = (count + step - 1) / step;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads() / rows, pieces));
  auto sums = at::zeros({rows, parts, heads, tokens, width}, weights.options());
  at::parallel_for(0, rows * parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t job = first; job < last; job++) {
      const int64_t row = job / parts, part = job % parts;
      for (int64_t number = part * pieces / parts; number < (part + 1) * pieces / parts; number++)
        for (int64_t head = 0; head < heads; head++) {
          auto values = of_head(codes, scale, offset, block, row, head);
          for (int64_t token = 0; token < tokens; token += at_once)
            mixed_of_head<bits, known>(
                values, weights.const_data_ptr<float>() + ((row * heads + head) * tokens + token) * count,
                std::min(at_once, tokens - token), width,
                sums.data_ptr<float>() + ((job * heads + head) * tokens + token) * width, number * step,
                std::min(number * step + step, count));
        }
    }
  });
  return parts == 1 ? sums.squeeze(1) : sums.sum(1);
}

#define FOR_WIDTH(function, bits) \
  (known == 1 ? function<bits, 64> : known == 2 ? function<bits, 128> : function<bits, 0>)
#define FOR_BITS(function)                                                          \
  (bits == 1   ? FOR_WIDTH(function, 1)                                             \
   : bits == 2 ? FOR_WIDTH(function, 2)                                             \
   : bits == 4 ? FOR_WIDTH(function, 4)                                             \
               : FOR_WIDTH(function, 8))

}  // namespace

at::Tensor scores(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                  int64_t bits, int64_t block, const at::Tensor& queries) {
  const auto known = queries.size(3) == 64 ? 1 : queries.size(3) == 128 ? 2 : 0;
  auto with = FOR_BITS(scores_with);
  return with(codes, scale, offset, block, queries.contiguous());
}

at::Tensor mixed(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                 int64_t bits, int64_t block, const at::Tensor& weights, int64_t width) {
  const auto known = width == 64 ? 1 : width == 128 ? 2 : 0;
  auto with = FOR_BITS(mixed_with);
  return with(codes, scale, offset, block, weights.contiguous(), width);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("scores", &scores);
  module.def("mixed", &mixed);
}
