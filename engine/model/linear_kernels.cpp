// Products of few rows with the weights of a linear layer, which are read once, at memory bandwidth.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in 2 s, ATen's headers in 7 s
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
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
// The sums of a tile stay in registers: there are 32 with AVX-512, otherwise 16.
constexpr int outs_at_once = 4, rows_at_once = lanes == 16 ? 6 : 2;
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
  void tile(int64_t row, int64_t first, const Weight* fetched, int64_t pass = 0, int64_t passes = 1) const {
    const float* from = input + row * input_stride;
    const Weight* by = weight + first * weight_stride;
    Lanes sums[some_rows][some_outs] = {};
    const Weight* ahead = fetched + pass * width / passes;
    int64_t i = 0, due = fetched ? 0 : -1;
    for (; i + lanes <= width; i += lanes) {
      Lanes weights[some_outs];
      for (int one = 0; one < some_outs; one++) weights[one] = load(by + one * weight_stride + i);
      if (i == due) {
        for (int one = 0; one < some_outs; one++) __builtin_prefetch(ahead + one * weight_stride, 0, 2);
        due += lanes * passes, ahead += lanes;
      }
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
  void rest(int64_t row, int64_t first, const Weight* fetched, int64_t pass, int64_t passes) const {
    if constexpr (some_rows > 0) {
      if (rows - row == some_rows)
        tile<some_rows, some_outs>(row, first, fetched, pass, passes);
      else
        rest<some_rows - 1, some_outs>(row, first, fetched, pass, passes);
    }
  }

  template <int some_outs>
  void all_rows(int64_t first, const Weight* fetched) const {
    int64_t row = 0;
    const int64_t passes = (rows + rows_at_once - 1) / rows_at_once;
    for (; row + rows_at_once <= rows; row += rows_at_once)
      tile<rows_at_once, some_outs>(row, first, fetched, row / rows_at_once, passes);
    rest<rows_at_once - 1, some_outs>(row, first, fetched, passes - 1, passes);
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

// Products with codes of 4 bits, in torch's order: for each block of outputs and each input a byte per two outputs, one
// of the first half of the block and one of the second. weight = (code - 8) * scale + offset.
struct FourBits {
  const float* input;  // [rows, width]
  const uint8_t* packed;
  const uint16_t* scales;  // bfloat16 [width / group, outs, 2]: scale and offset
  float* out;  // [rows, outs]
  int64_t rows, outs, width, group;

  static float from_bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float found;
    std::memcpy(&found, &wide, sizeof(found));
    return found;
  }

  static std::array<Lanes, 2> halves(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m512 elements = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));  // their lowest 4 bits count
    return {(Lanes)_mm512_permutexvar_ps(codes, elements),
            (Lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), elements)};
#elif defined(__AVX2__)
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    return {(Lanes)_mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15))),
            (Lanes)_mm256_cvtepi32_ps(_mm256_srli_epi32(codes, 4))};
#else
    std::array<Lanes, 2> found;
    for (int64_t lane = 0; lane < lanes; lane++) {
      found[0][lane] = from[lane] & 15;
      found[1][lane] = from[lane] >> 4;
    }
    return found;
#endif
  }

  // `chunks`: of `lanes` bytes, in half a block.
  template <int some_rows, int chunks>
  void block(int64_t row, int64_t first) const {
    constexpr int64_t half = chunks * lanes;
    const uint8_t* codes = packed + first * width / 2;
    float totals[some_rows][2 * half] = {};
    for (int64_t i = 0; i < width;) {
      const uint16_t* of_group = scales + (i / group * outs + first) * 2;
      Lanes sums[some_rows][2][chunks] = {};
      float inputs[some_rows] = {};
      for (const int64_t end = i + group; i < end; i++, codes += half) {
        __builtin_prefetch(codes + 4096, 0, 2);
        for (int chunk = 0; chunk < chunks; chunk++) {
          const std::array<Lanes, 2> weights = halves(codes + chunk * lanes);
          for (int other = 0; other < some_rows; other++)
            for (int side = 0; side < 2; side++)
              sums[other][side][chunk] += input[(row + other) * width + i] * weights[side];
        }
        for (int other = 0; other < some_rows; other++) inputs[other] += input[(row + other) * width + i];
      }
      float scale[2 * half], offset[2 * half];
      for (int64_t one = 0; one < 2 * half; one++) {
        scale[one] = from_bfloat16(of_group[2 * one]);
        offset[one] = from_bfloat16(of_group[2 * one + 1]) - 8 * scale[one];
      }
      for (int other = 0; other < some_rows; other++) {
        float found[2 * half];
        std::memcpy(found, sums[other], sizeof(found));
        for (int64_t one = 0; one < 2 * half; one++)
          totals[other][one] += found[one] * scale[one] + inputs[other] * offset[one];
      }
    }
    for (int other = 0; other < some_rows; other++)
      std::memcpy(out + (row + other) * outs + first, totals[other], sizeof(totals[other]));
  }

  template <int chunks>
  void compute() const {
    constexpr int64_t outs_of_block = 2 * chunks * lanes;
    const int64_t blocks = outs / outs_of_block, threads = torch::stable::get_num_threads();
    torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, (blocks + threads - 1) / threads),
      [this](int64_t from, int64_t to) {
        for (int64_t one = from; one < to; one++) {
          int64_t row = 0;
          for (; row + 4 <= rows; row += 4) block<4, chunks>(row, one * outs_of_block);
          if (rows - row == 3) block<3, chunks>(row, one * outs_of_block);
          if (rows - row == 2) block<2, chunks>(row, one * outs_of_block);
          if (rows - row == 1) block<1, chunks>(row, one * outs_of_block);
        }
      });
  }
};

Tensor linear(Tensor input, Tensor weight) { return product<float>(input, weight, nullptr); }

Tensor int8_linear(Tensor input, Tensor codes, Tensor scales) {
  return product<int8_t>(input, codes, static_cast<const float*>(scales.data_ptr()));
}

Tensor int4_linear(Tensor input, Tensor packed, Tensor scales, int64_t outs_of_block) {
  const int64_t rows = input.size(0), width = input.size(1), outs = packed.size(0), chunks = outs_of_block / lanes / 2;
  Tensor out = torch::stable::new_empty(input, {rows, outs});
  const FourBits product{
    static_cast<const float*>(input.data_ptr()), static_cast<const uint8_t*>(packed.data_ptr()),
    static_cast<const uint16_t*>(scales.data_ptr()), static_cast<float*>(out.data_ptr()), rows, outs, width,
    width / scales.size(0)};
  chunks == 1 ? product.compute<1>() : chunks == 2 ? product.compute<2>() : product.compute<4>();
  return out;
}

}  // namespace

// input float32 [rows, width], weight float32 or codes int8 [outs, width], all with a contiguous width, scales float32
// [outs] -> [rows, outs]. packed, scales of 4 bits: see `FourBits`.
STABLE_TORCH_LIBRARY(kvengine, library) {
  library.def("linear(Tensor input, Tensor weight) -> Tensor");
  library.def("int8_linear(Tensor input, Tensor codes, Tensor scales) -> Tensor");
  library.def("int4_linear(Tensor input, Tensor packed, Tensor scales, int outs_of_block) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("int8_linear", TORCH_BOX(&int8_linear));
  library.impl("int4_linear", TORCH_BOX(&int4_linear));
}
