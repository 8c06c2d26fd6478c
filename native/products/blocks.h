// Products with codes in blocks: 16 outputs and 32 inputs share a place in memory, and each output of them a scale.
#pragma once

#include <cmath>
#include <memory>

#include "matrix_units.h"

namespace {

constexpr int64_t block_outs = 16, block_inputs = 32;

// Codes uint8 [outs / 16, width / 32, 64 * bits]: of each 4 inputs 64 bytes, 4 of each output. With 4 bits the low halves
// are the first 4 of 8 inputs, the high ones the others.
// Scales float16 [outs / 16, width / 32, 1 or 2, 16]: weight = (code - middle) * scale, or code * scale + least.
struct BlockCodes {
  const uint8_t* codes;
  const uint16_t* scales;
  int64_t blocks, groups;  // of 16 outputs, of 32 inputs
  bool has_least;
};

typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef int32_t Integers __attribute__((vector_size(4 * lanes)));
constexpr int64_t vectors_of_block = block_outs / lanes;

inline Lanes as_floats(Words of) { return __builtin_convertvector((Integers)of, Lanes); }

inline float half_as_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
  float value;
  if (rest < 0x400) {  // below the smallest exponent
    value = rest * 0x1p-24f;
  } else {
    const uint32_t bits = rest >= 0x7C00 ? (rest << 13) | 0x7F800000 : (rest << 13) + 0x38000000;
    std::memcpy(&value, &bits, sizeof(value));
  }
  return sign ? -value : value;
}

inline Lanes halves_as_floats(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Lanes floats;
  for (int64_t lane = 0; lane < lanes; lane++) floats[lane] = half_as_float(from[lane]);
  return floats;
#endif
}

// The codes of 4 inputs, a byte each, for a vector of outputs. quad: which 4 of the 32 inputs.
template <int bits>
inline Words quad_of(const uint8_t* group, int quad, int64_t vector) {
  const int64_t at = vector * 4 * lanes;
  if constexpr (bits == 8) return load<Words>(group + quad * 64 + at);
  const Words both = load<Words>(group + quad / 2 * 64 + at);
  return (quad % 2 ? both >> 4 : both) & 0x0F0F0F0F;
}

constexpr int middle_of(int bits) { return 1 << (bits - 1); }

// An input for products with codes, of which the last group is filled up with zeros.
class BlockInput {
 public:
  static constexpr int64_t most_rows = 256;
#ifdef __AVX512VNNI__
  static constexpr bool has_integers = true;
  // Each group of 32 inputs is a scale times integers of 24 bits, in three bytes: their error is that of a float32.
  static constexpr int parts = 3;
#else
  static constexpr bool has_integers = false;
#endif
  const int64_t rows, groups;

  explicit BlockInput(const Rows& input)
      : rows(input.count), groups((input.width + block_inputs - 1) / block_inputs), sums(new float[rows * groups]) {
#ifdef __AVX512VNNI__
    bytes.reset(new int8_t[rows * groups * parts * block_inputs]);
    totals.reset(new int32_t[rows * groups * parts]);
    scales.reset(new float[rows * groups]);
#else
    filled.reset(new float[rows * groups * block_inputs]);
#endif
    const int64_t at_least = std::max<int64_t>(1, 32 / groups);
    torch::stable::parallel_for(0, rows, input.threads > 1 ? at_least : rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < groups; group++) {
          const float* from = input.values + row * input.stride + group * block_inputs;
          const int64_t left = input.width - group * block_inputs;
          float some[block_inputs] = {};
          if (left < block_inputs) std::memcpy(some, from, left * sizeof(float));
          read(left < block_inputs ? some : from, row * groups + group);
        }
    });
  }

  float sum(int64_t row, int64_t group) const { return sums[row * groups + group]; }

#ifdef __AVX512VNNI__
  const int8_t* bytes_of(int64_t row, int64_t group) const {
    return bytes.get() + (row * groups + group) * parts * block_inputs;
  }
  const int32_t* totals_of(int64_t row, int64_t group) const { return totals.get() + (row * groups + group) * parts; }
  float scale(int64_t row, int64_t group) const { return scales[row * groups + group]; }
#else
  const float* values(int64_t row, int64_t group) const { return filled.get() + (row * groups + group) * block_inputs; }
#endif

 private:
  std::unique_ptr<float[]> sums;
#ifdef __AVX512VNNI__
  std::unique_ptr<int8_t[]> bytes;  // [rows, groups, parts, 32], the highest first
  std::unique_ptr<int32_t[]> totals;  // of each part
  std::unique_ptr<float[]> scales;

  void read(const float* from, int64_t at) {
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    constexpr float largest = 127 << 16;
    const float inverse = most > 1e-30f ? largest / most : 0;
    sums[at] = sum;
    scales[at] = std::isfinite(sum) && std::isfinite(most) ? (inverse ? most / largest : 0) : NAN;
    __m512i integers[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(inverse))),
                           _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(inverse)))};
    for (int part = parts - 1; part >= 0; part--) {
      int8_t* to = bytes.get() + (at * parts + part) * block_inputs;
      __m512i total = _mm512_setzero_si512();
      for (int half = 0; half < 2; half++) {  // the lowest byte, from -128 to 127, and what is left of the integers
        const __m512i byte = _mm512_srai_epi32(_mm512_slli_epi32(integers[half], 24), 24);
        integers[half] = _mm512_srai_epi32(_mm512_sub_epi32(integers[half], byte), 8);
        total = _mm512_add_epi32(total, byte);
        _mm_storeu_si128((__m128i*)(to + half * 16), _mm512_cvtepi32_epi8(byte));
      }
      totals[at * parts + part] = _mm512_reduce_add_epi32(total);
    }
  }
#else
  std::unique_ptr<float[]> filled;  // [rows, groups, 32]

  void read(const float* from, int64_t at) {
    std::memcpy(filled.get() + at * block_inputs, from, block_inputs * sizeof(float));
    Lanes added = {};
    for (int64_t i = 0; i < block_inputs; i += lanes) added += load(from + i);
    sums[at] = total(added);
  }
#endif
};

template <int bits>
struct BlockProduct {
  static constexpr int64_t bytes_of_group = 64 * bits;

  BlockCodes weights;
  const BlockInput* input;   // or null
  const InputTiles* tiles;   // instead, or null
  float* out;                // [rows, outs]
  int64_t out_stride;

  int64_t shares() const { return tiles ? (weights.blocks + 3) / 4 : weights.blocks; }

  bool has_small_shares() const { return false; }

  void compute(int64_t from, int64_t to) const {
#ifdef HAS_MATRIX_UNITS
    if (tiles) return by_units(from, to);
#endif
    for (int64_t block = from; block < to; block++) {
      if (weights.has_least)
        rows_of<true>(block);
      else
        rows_of<false>(block);
    }
  }

 private:
  const uint8_t* codes_of(int64_t block, int64_t group) const {
    return weights.codes + (block * weights.groups + group) * bytes_of_group;
  }

  const uint16_t* scales_of(int64_t block, int64_t group) const {
    return weights.scales + (block * weights.groups + group) * (weights.has_least ? 2 : 1) * block_outs;
  }

  // Of the middle code: multiples of it lose less when they are added up than those of the least weight.
  static Lanes offset_of(Lanes scale, const uint16_t* least) {
    return scale * float(middle_of(bits)) + halves_as_floats(least);
  }

  template <bool has_least>
  void rows_of(int64_t block) const {
    constexpr int most = at_once;
    for (int64_t row = 0; row < input->rows; row += most) some_rows<most, has_least>(row, block);
  }

  template <int some, bool has_least>
  void some_rows(int64_t row, int64_t block) const {
    if constexpr (some > 1)
      if (input->rows - row < some) return some_rows<some - 1, has_least>(row, block);
    for (int64_t vector = 0; vector < vectors_of_block; vector++) tile<some, has_least>(row, block, vector);
  }

  template <int some>
  void write(const Lanes* sums, int64_t row, int64_t block, int64_t vector) const {
    float* to = out + row * out_stride + block * block_outs + vector * lanes;
    for (int other = 0; other < some; other++) store(sums[other], to + other * out_stride);
  }

#ifdef __AVX512VNNI__
  static constexpr int at_once = 6, parts = BlockInput::parts;  // whose sums stay in registers

  template <int some, bool has_least>
  void tile(int64_t row, int64_t block, int64_t vector) const {
    Lanes sums[some] = {};
    for (int64_t group = 0; group < weights.groups; group++) {
      const uint8_t* codes = codes_of(block, group);
      const uint16_t* scales = scales_of(block, group);
      __m512i found[some][parts];
      for (int other = 0; other < some; other++) {
        const int32_t* totals = input->totals_of(row + other, group);
        for (int part = 0; part < parts; part++)
          found[other][part] = _mm512_set1_epi32(-middle_of(bits) * totals[part]);
      }
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; quad++) {
        if (quad % (bits == 8 ? 1 : 2) == 0) fetch_ahead(codes + (bits == 8 ? quad : quad / 2) * 64);
        const __m512i weight = (__m512i)quad_of<bits>(codes, quad, 0);
        for (int other = 0; other < some; other++) {
          const int8_t* bytes = input->bytes_of(row + other, group) + quad * 4;
          for (int part = 0; part < parts; part++) {
            int32_t four;
            std::memcpy(&four, bytes + part * block_inputs, sizeof(four));
            found[other][part] = _mm512_dpbusd_epi32(found[other][part], weight, _mm512_set1_epi32(four));
          }
        }
      }
      const __m512 scale = (__m512)halves_as_floats(scales);
      const Lanes offset = has_least ? offset_of((Lanes)scale, scales + block_outs) : Lanes{};
      for (int other = 0; other < some; other++) {
        const __m512i rest = _mm512_add_epi32(_mm512_slli_epi32(found[other][1], 8), found[other][2]);
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(found[other][0]), _mm512_set1_ps(65536),
                                           _mm512_cvtepi32_ps(rest));
        const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(input->scale(row + other, group)));
        sums[other] = (Lanes)_mm512_fmadd_ps(sum, by, (__m512)sums[other]);
        if (has_least)
          add_product(sums[other], offset, input->sum(row + other, group) + Lanes{});
      }
    }
    write<some>(sums, row, block, vector);
  }
#else
  static constexpr int at_once = lanes == 16 ? 6 : 3;

  template <int some, bool has_least>
  void tile(int64_t row, int64_t block, int64_t vector) const {
    Lanes sums[some] = {};
    for (int64_t group = 0; group < weights.groups; group++) {
      const uint8_t* codes = codes_of(block, group);
      const uint16_t* scales = scales_of(block, group) + vector * lanes;
      Lanes found[some][4] = {};  // by the byte of the code, whose value is 256, 65536 ... times as large
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; quad++) {
        if (vector == 0 && quad % (bits == 8 ? 1 : 2) == 0) fetch_ahead(codes + (bits == 8 ? quad : quad / 2) * 64);
        const Words four = quad_of<bits>(codes, quad, vector);
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; byte++) {
          const bool is_shifted = bits == 8 && byte == 3;  // it would be negative
          const Lanes weight = as_floats(is_shifted ? four >> 24 : four & (0xFFu << 8 * byte));
          for (int other = 0; other < some; other++)
            add_product(found[other][byte], weight, input->values(row + other, group)[quad * 4 + byte] + Lanes{});
        }
      }
      const Lanes scale = halves_as_floats(scales);
      const Lanes offset = has_least ? offset_of(scale, scales + block_outs) : Lanes{};
      for (int other = 0; other < some; other++) {
        Lanes sum = found[other][0] + found[other][1] * 0x1p-8f + found[other][2] * 0x1p-16f +
                    found[other][3] * (bits == 8 ? 1 : 0x1p-24f);
        const float of_inputs = input->sum(row + other, group);
        add_product(sums[other], sum - middle_of(bits) * of_inputs, scale);
        if (has_least) add_product(sums[other], offset, of_inputs + Lanes{});
      }
    }
    write<some>(sums, row, block, vector);
  }
#endif

#ifdef HAS_MATRIX_UNITS
  // 64 outputs: four blocks of 16, the last of which there may be fewer of.
  void by_units(int64_t from, int64_t to) const {
    const TileConfiguration configuration;
    alignas(64) char decoded[4 * bytes_of_tile];
    const auto sums = tiles->new_sums();
    tiles->by_slices([&](const Slice& slice) {
      for (int64_t four = from; four < to; four++) {
        for (int64_t group = slice.begin; group < slice.end; group++) {
          Lanes scale[4] = {}, offset[4] = {};
          for (int64_t i = 0; i < 4; i++) {
            const int64_t block = std::min(4 * four + i, weights.blocks - 1);  // one twice instead of none
            const uint16_t* scales = scales_of(block, group);
            scale[i] = halves_as_floats(scales);
            if (weights.has_least) offset[i] = offset_of(scale[i], scales + block_outs);
            decode_tile(codes_of(block, group), decoded + i * bytes_of_tile);
          }
          tiles->multiply(slice, group, {decoded, scale, weights.has_least ? offset : nullptr}, sums.get());
        }
        const int64_t first = four * outs_of_units;
        tiles->write(slice, sums.get(), out + first, out_stride, weights.blocks * block_outs - first);
      }
    });
  }

  // A row of a tile has a pair of inputs for each output, of which one is 16 further on than the other.
  void decode_tile(const uint8_t* codes, char* to) const {
    const __m512 middle = _mm512_set1_ps(middle_of(bits));
    for (int quad = 0; quad < 4; quad++) {
      const Words low = quad_of<bits>(codes, quad, 0), high = quad_of<bits>(codes, quad + 4, 0);
      for (int byte = 0; byte < 4; byte++) {
        const __m512 one = (__m512)as_floats((low >> 8 * byte) & 0xFF);
        const __m512 other = (__m512)as_floats((high >> 8 * byte) & 0xFF);
        const __m512i pairs = pairs_of(_mm512_sub_ps(one, middle), _mm512_sub_ps(other, middle));
        _mm512_store_si512(to + (quad * 4 + byte) * 64, pairs);
      }
    }
  }
#endif
};

// The weights of some blocks in full, float32 [16 * blocks, 32 * groups].
template <int bits>
void decode_blocks(const BlockCodes& weights, float* to) {
  const int64_t width = weights.groups * block_inputs;
  torch::stable::parallel_for(0, weights.blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
      for (int64_t group = 0; group < weights.groups; group++) {
        const int64_t at = block * weights.groups + group;
        const uint8_t* codes = weights.codes + at * 64 * bits;
        const uint16_t* scales = weights.scales + at * (weights.has_least ? 2 : 1) * block_outs;
        for (int64_t one = 0; one < block_outs; one++) {
          const float scale = half_as_float(scales[one]);
          const float least = weights.has_least ? half_as_float(scales[block_outs + one]) : 0;
          float* row = to + (block * block_outs + one) * width + group * block_inputs;
          for (int64_t i = 0; i < block_inputs; i++) {
            const uint8_t byte = codes[(bits == 8 ? i / 4 : i / 8) * 64 + one * 4 + i % 4];
            const int code = bits == 8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
            row[i] = (weights.has_least ? code : code - middle_of(bits)) * scale + least;
          }
        }
      }
  });
}

inline uint16_t float_as_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = bits >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (!(size < 65520)) return sign | (size == size ? 0x7C00 : 0x7E00);
  if (size < 0x1p-14f) return sign | uint16_t(std::nearbyint(size * 0x1p24f));
  bits &= 0x7FFFFFFF;
  return sign | uint16_t((bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13);
}

inline void store_as_halves(Lanes from, uint16_t* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)from, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t lane = 0; lane < lanes; lane++) to[lane] = float_as_half(from[lane]);
#endif
}

inline Lanes rounded_to_half(Lanes value) {
  uint16_t halves[lanes];
  store_as_halves(value, halves);
  return halves_as_floats(halves);
}

// Codes of 4 bits, scales and least values for the weights of a group, of a vector of outputs: those with the smallest
// squared error of some that are tried. For each of several ranges around the middle of the weights these are the codes,
// then the scale and the least value that fit them best, a few times.
struct FourBitFit {
  Lanes scale, least;
  uint8_t codes[block_inputs][lanes];

  explicit FourBitFit(const Lanes* weights) {
    Lanes low = weights[0], high = weights[0], mean = {};
    for (int64_t i = 0; i < block_inputs; i++) {
      low = weights[i] < low ? weights[i] : low, high = weights[i] > high ? weights[i] : high;
      mean += weights[i] * (1.0f / block_inputs);
    }
    Lanes smallest = Lanes{} + INFINITY;
    scale = Lanes{}, least = rounded_to_half(mean);
    for (const float share : {0.75f, 0.8333f, 0.9167f, 1.0f}) {
      Lanes by = (high - low) * (share / 15), from = (low + high) * 0.5f - by * 7.5f;
      for (int fit = 0; fit < 5; fit++) {
        by = rounded_to_half(by), from = rounded_to_half(from);
        Lanes error = {}, sum = {}, products = {}, squares = {};
        const Lanes inverse = inverse_of(by);
        for (int64_t i = 0; i < block_inputs; i++) {
          const Lanes code = code_of(weights[i], from, inverse), missed = code * by + from - weights[i];
          error += missed * missed, sum += code, products += code * weights[i], squares += code * code;
        }
        const auto better = error < smallest;
        smallest = better ? error : smallest, scale = better ? by : scale, least = better ? from : least;
        const Lanes middle = sum * (1.0f / block_inputs), spread = squares - sum * middle;
        by = (products - sum * mean) / (spread > 1 ? spread : Lanes{} + 1), from = mean - by * middle;
      }
    }
    const Lanes inverse = inverse_of(scale);
    for (int64_t i = 0; i < block_inputs; i++) {
      const Lanes code = code_of(weights[i], least, inverse);
      const Integers integers = __builtin_convertvector(code, Integers);
      for (int64_t lane = 0; lane < lanes; lane++) codes[i][lane] = static_cast<uint8_t>(integers[lane]);
    }
  }

 private:
  static Lanes inverse_of(Lanes scale) { return scale > 0 ? 1 / scale : Lanes{}; }

  static Lanes code_of(Lanes weight, Lanes least, Lanes inverse) {
    const Lanes exact = (weight - least) * inverse + 0.5f, bounded = exact > 15 ? Lanes{} + 15 : exact;
    return __builtin_convertvector(__builtin_convertvector(bounded > 0 ? bounded : Lanes{}, Integers), Lanes);
  }
};

// weights: float32 [16 * blocks, 32 * groups], as codes and scales of 4 bits with least values.
inline void encode_blocks(const float* weights, int64_t blocks, int64_t groups, uint8_t* codes, uint16_t* scales) {
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
      for (int64_t group = 0; group < groups; group++) {
        const int64_t at = block * groups + group;
        uint8_t* to = codes + at * 256;
        for (int64_t first = 0; first < block_outs; first += lanes) {
          alignas(64) float values[block_inputs * lanes];
          const float* from = weights + ((block * block_outs + first) * groups + group) * block_inputs;
          transpose(from, groups * block_inputs, lanes, block_inputs, values, lanes);
          const FourBitFit fit(reinterpret_cast<const Lanes*>(values));
          for (int64_t i = 0; i < block_inputs; i += 8)
            for (int64_t byte = 0; byte < 4; byte++)
              for (int64_t lane = 0; lane < lanes; lane++)
                to[i * 8 + (first + lane) * 4 + byte] = fit.codes[i + byte][lane] | fit.codes[i + byte + 4][lane] << 4;
          store_as_halves(fit.scale, scales + at * 2 * block_outs + first);
          store_as_halves(fit.least, scales + (at * 2 + 1) * block_outs + first);
        }
      }
  });
}

}  // namespace
