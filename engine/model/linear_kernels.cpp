// Products of few rows with the weights of a linear layer, which are read once, at memory bandwidth.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in 2 s, ATen's headers in 7 s
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using torch::stable::Tensor;

#ifdef __AVX512F__
constexpr int64_t lanes = 16;
#else
constexpr int64_t lanes = 8;
#endif
// One tile's sums stay in registers: 32 of them with AVX-512, otherwise 16.
constexpr int outs_at_once = lanes == 16 ? 4 : 2, rows_at_once = lanes == 16 ? 6 : 4;
typedef float Lanes __attribute__((vector_size(4 * lanes)));
typedef float Quarter __attribute__((vector_size(16)));

inline Lanes load(const float* from) {
  Lanes found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

inline Lanes load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Lanes found;
  for (int64_t lane = 0; lane < lanes; lane++) found[lane] = from[lane];
  return found;
#endif
}

inline float sum(Lanes values) {
  Quarter parts[lanes / 4];
  std::memcpy(parts, &values, sizeof(values));
  for (int64_t part = 1; part < lanes / 4; part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

// A product of matrices: input [rows, width] and weight [outs, width], the width contiguous -> out [rows, outs].
template <class Weight>
struct Product {
  const float* input;
  const Weight* weight;
  const float* scales;  // by which outputs are multiplied, or null
  float* out;
  int64_t rows, outs, width, input_stride, weight_stride;

  // `fetched`: the weights that are read next, or null.
  template <int some_rows, int some_outs>
  void tile(int64_t row, int64_t first, const Weight* fetched) const {
    const float* from = input + row * input_stride;
    const Weight* by = weight + first * weight_stride;
    Lanes sums[some_rows][some_outs] = {};
    int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
      Lanes weights[some_outs];
      for (int one = 0; one < some_outs; one++) weights[one] = load(by + one * weight_stride + i);
      if (fetched)
        for (int one = 0; one < some_outs; one++) __builtin_prefetch(fetched + one * weight_stride + i, 0, 2);
      for (int other = 0; other < some_rows; other++) {
        const Lanes values = load(from + other * input_stride + i);
        for (int one = 0; one < some_outs; one++) sums[other][one] += values * weights[one];
      }
    }
    for (int other = 0; other < some_rows; other++)
      for (int one = 0; one < some_outs; one++) {
        float total = sum(sums[other][one]);
        for (int64_t rest = i; rest < width; rest++)
          total += from[other * input_stride + rest] * static_cast<float>(by[one * weight_stride + rest]);
        out[(row + other) * outs + first + one] = scales ? total * scales[first + one] : total;
      }
  }

  template <int some_rows, int some_outs>
  void rest(int64_t row, int64_t first, const Weight* fetched) const {
    if constexpr (some_rows > 0) {
      if (rows - row == some_rows)
        tile<some_rows, some_outs>(row, first, fetched);
      else
        rest<some_rows - 1, some_outs>(row, first, fetched);
    }
  }

  template <int some_outs>
  void all_rows(int64_t first, const Weight* fetched) const {
    int64_t row = 0;
    for (; row + rows_at_once <= rows; row += rows_at_once, fetched = nullptr)
      tile<rows_at_once, some_outs>(row, first, fetched);
    rest<rows_at_once - 1, some_outs>(row, first, fetched);
  }

  void compute() const {
    const int64_t tiles = (outs + outs_at_once - 1) / outs_at_once, threads = torch::stable::get_num_threads();
    torch::stable::parallel_for(0, tiles, std::max<int64_t>(1, (tiles + threads - 1) / threads),
      [this](int64_t from, int64_t to) {
        int64_t first = from * outs_at_once;
        const int64_t end = std::min(to * outs_at_once, outs);
        for (; first + outs_at_once <= end; first += outs_at_once) {
          const int64_t next = first + outs_at_once;
          all_rows<outs_at_once>(first, next + outs_at_once <= end ? weight + next * weight_stride : nullptr);
        }
        for (; first < end; first++) all_rows<1>(first, nullptr);
      });
  }
};

template <class Weight>
Tensor product(const Tensor& input, const Tensor& weight, const float* scales) {
  Tensor out = torch::stable::new_empty(input, {input.size(0), weight.size(0)});
  Product<Weight>{
    static_cast<const float*>(input.data_ptr()), static_cast<const Weight*>(weight.data_ptr()), scales,
    static_cast<float*>(out.data_ptr()), input.size(0), weight.size(0), weight.size(1), input.stride(0),
    weight.stride(0)}.compute();
  return out;
}

Tensor linear(Tensor input, Tensor weight) { return product<float>(input, weight, nullptr); }

Tensor int8_linear(Tensor input, Tensor codes, Tensor scales) {
  return product<int8_t>(input, codes, static_cast<const float*>(scales.data_ptr()));
}

}  // namespace

// input float32 [rows, width], weight float32 or codes int8 [outs, width], both with a contiguous width, scales float32
// [outs] -> [rows, outs].
STABLE_TORCH_LIBRARY(kvengine, library) {
  library.def("linear(Tensor input, Tensor weight) -> Tensor");
  library.def("int8_linear(Tensor input, Tensor codes, Tensor scales) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("int8_linear", TORCH_BOX(&int8_linear));
}
