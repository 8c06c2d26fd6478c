// Weights as codes in blocks: 16 outputs and 32 inputs share a place in memory, and each output of them a scale.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <type_traits>

#include "../elements.h"
#include "rows.h"

namespace {

constexpr int64_t block_outs = 16, block_inputs = 32;
constexpr int64_t groups_of_scale = 8;  // where scales have factors
constexpr int bits_of_halves = 6;       // where the halves of a group have a scale each

typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef int32_t Integers __attribute__((vector_size(4 * lanes)));
constexpr int64_t vectors_of_block = block_outs / lanes;

inline Lanes as_floats(Words of) { return __builtin_convertvector((Integers)of, Lanes); }

inline Lanes bytes_as_floats(const int8_t* from) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Lanes floats;
  for (int64_t lane = 0; lane < lanes; lane++) floats[lane] = from[lane];
  return floats;
#endif
}

// Codes uint8 [outs / 16, width / 32, 64 * bits]: fields of 4 bits, then of those above, or of 8 (see `field_of`).
// Scales float16 [outs / 16, width / 32, 1 or 2, 16]: weight = (code - middle) * scale, or code * scale + least.
// Or those [outs / 16, width / 256, 1 or 2, 16], with factors int8 [outs / 16, width / 32, 2, 16] of them: those of the
// scale and the least value, or of the scale for the first 16 inputs and for the others.
struct BlockCodes {
  int bits;  // 4, 5, 6 or 8
  const uint8_t* codes;
  const Float16* scales;
  const int8_t* factors;   // or null
  int64_t blocks, groups;  // of 16 outputs, of 32 inputs
  bool has_least;

  bool has_halves() const { return factors && !has_least; }

  // For a vector of outputs the scale, or (which: 1) the least value or the scale of the last 16 inputs.
  ALWAYS_INLINE Lanes scale(int64_t block, int64_t group, int which, int64_t vector = 0) const {
    const int64_t count = has_least ? 2 : 1, index = has_least ? which : 0, at = vector * lanes;
    const int64_t all = factors ? groups / groups_of_scale : groups, place = factors ? group / groups_of_scale : group;
    const Lanes scale = floats(scales + ((block * all + place) * count + index) * block_outs + at);
    if (!factors) return scale;
    return scale * bytes_as_floats(factors + ((block * groups + group) * 2 + which) * block_outs + at);
  }
};

// Fields of so many bits for 32 inputs and 16 outputs, which take 64 * width bytes: a byte has those of an output for
// some inputs that are 4 apart. These are 4 inputs' of a vector of outputs, a byte each, from the bit `place` on. quad:
// which 4 of the 32.
template <int width, int place>
inline Words field_of(const uint8_t* fields, int quad, int64_t vector) {
  constexpr int quads = 8 / width;
  constexpr uint32_t mask = (0xFFu >> (8 - width) << place) * 0x01010101u;
  const Words bytes = load<Words>(fields + quad / quads * 64 + vector * 4 * lanes);
  const int left = place - width * (quad % quads);
  return (left > 0 ? bytes << left : bytes >> -left) & mask;
}

template <int width>
inline void put_field(uint8_t* fields, int64_t out, int64_t input, int value) {
  constexpr int quads = 8 / width;
  const int64_t quad = input / 4;
  fields[quad / quads * 64 + out * 4 + input % 4] |= value << width * (quad % quads);
}

constexpr int lower_bits(int bits) { return bits == 8 ? 8 : 4; }

// The codes of 4 inputs, a byte each, for a vector of outputs.
template <int bits>
inline Words quad_of(const uint8_t* group, int quad, int64_t vector) {
  constexpr int lower = lower_bits(bits);
  const Words codes = field_of<lower, 0>(group, quad, vector);
  if constexpr (bits == lower) return codes;
  else return codes | field_of<bits - lower, lower>(group + 64 * lower, quad, vector);
}

// Into a group whose bytes were zero.
template <int bits>
inline void put_code(uint8_t* group, int64_t out, int64_t input, int code) {
  constexpr int lower = lower_bits(bits);
  put_field<lower>(group, out, input, code & ((1 << lower) - 1));
  if constexpr (bits > lower) put_field<bits - lower>(group + 64 * lower, out, input, code >> lower);
}

// Calls `use(bits)`, a constant, for the bits of codes.
template <class Use>
auto with_bits(int bits, Use use) {
  switch (bits) {
    case 4: return use(std::integral_constant<int, 4>{});
    case 5: return use(std::integral_constant<int, 5>{});
    case 6: return use(std::integral_constant<int, 6>{});
    default:
      STD_TORCH_CHECK(bits == 8, "codes have 4, 5, 6 or 8 bits, and these ", bits);
      return use(std::integral_constant<int, 8>{});
  }
}

constexpr int middle_of(int bits) { return 1 << (bits - 1); }

// The weights of a group for a vector of outputs.
template <int bits>
inline void decode_group(const BlockCodes& weights, int64_t block, int64_t group, int64_t vector,
                         float values[block_inputs][lanes]) {
  const uint8_t* codes = weights.codes + (block * weights.groups + group) * 64 * bits;
  for (int quad = 0; quad < 8; quad++) {
    const Words four = quad_of<bits>(codes, quad, vector);
    const Lanes scale = weights.scale(block, group, weights.has_halves() && quad >= 4, vector);
    const Lanes least = weights.has_least ? weights.scale(block, group, 1, vector) : Lanes{};
    const float zero = weights.has_least ? 0 : middle_of(bits);
    for (int byte = 0; byte < 4; byte++)
      store((as_floats(four >> 8 * byte & 0xFF) - zero) * scale + least, values[quad * 4 + byte]);
  }
}

// The weights of some blocks in full, float32 [16 * blocks, 32 * groups].
template <int bits>
void decode_blocks(const BlockCodes& weights, float* to) {
  const int64_t width = weights.groups * block_inputs;
  torch::stable::parallel_for(0, weights.blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float values[block_inputs][lanes];
    for (int64_t block = begin; block < end; block++)
      for (int64_t group = 0; group < weights.groups; group++)
        for (int64_t vector = 0; vector < vectors_of_block; vector++) {
          decode_group<bits>(weights, block, group, vector, values);
          float* row = to + (block * block_outs + vector * lanes) * width + group * block_inputs;
          for (int64_t lane = 0; lane < lanes; lane++, row += width)
            for (int64_t i = 0; i < block_inputs; i++) row[i] = values[i][lane];
        }
  });
}

// Those of some outputs, float32 [count, 32 * groups].
template <int bits>
void decode_rows(const BlockCodes& weights, const int64_t* outs, int64_t count, float* to) {
  alignas(64) float values[block_inputs][lanes];
  for (int64_t row = 0; row < count; row++)
    for (int64_t group = 0, out = outs[row] % block_outs; group < weights.groups; group++) {
      decode_group<bits>(weights, outs[row] / block_outs, group, out / lanes, values);
      for (int64_t i = 0; i < block_inputs; i++) *to++ = values[i][out % lanes];
    }
}

inline Lanes rounded_to_half(Lanes value) {
  Float16 halves[lanes];
  round_to(value, halves);
  return floats(halves);
}

// Codes, scales and least values for the weights of a group, of a vector of outputs: those with the smallest squared
// error of some that are tried. For each of several ranges around the middle of the weights these are the codes, then
// the scale and the least value that fit them best, a few times.
template <int bits>
struct Fit {
  static constexpr float most = (1 << bits) - 1;
  Lanes scale, least;
  uint8_t codes[block_inputs][lanes];

  explicit Fit(const Lanes* weights) {
    Lanes low = weights[0], high = weights[0], mean = {};
    for (int64_t i = 0; i < block_inputs; i++) {
      low = weights[i] < low ? weights[i] : low, high = weights[i] > high ? weights[i] : high;
      mean += weights[i] * (1.0f / block_inputs);
    }
    Lanes smallest = Lanes{} + INFINITY;
    scale = Lanes{}, least = rounded_to_half(mean);
    for (const float share : {0.75f, 0.8333f, 0.9167f, 1.0f}) {
      Lanes by = (high - low) * (share / most), from = (low + high) * 0.5f - by * (most / 2);
      for (int fit = 0; fit < 5; fit++) {
        by = rounded_to_half(by), from = rounded_to_half(from);
        Lanes error = {}, sum = {}, products = {}, squares = {};
        const Lanes inverse = inverse_of(by);
        for (int64_t i = 0; i < block_inputs; i++) {
          const Lanes weight = weights[i], code = code_of(weight, from, inverse), missed = code * by + from - weight;
          error += missed * missed, sum += code, products += code * weight, squares += code * code;
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

  ALWAYS_INLINE static Lanes code_of(Lanes weight, Lanes least, Lanes inverse) {
    const Lanes exact = (weight - least) * inverse + 0.5f, bounded = exact > most ? Lanes{} + most : exact;
    return __builtin_convertvector(__builtin_convertvector(bounded > 0 ? bounded : Lanes{}, Integers), Lanes);
  }
};

// weights: float32 [16 * blocks, 32 * groups], as codes and scales with least values.
template <int bits>
void encode_blocks(const float* weights, int64_t blocks, int64_t groups, uint8_t* codes, Float16* scales) {
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
      for (int64_t group = 0; group < groups; group++) {
        const int64_t at = block * groups + group;
        uint8_t* to = codes + at * 64 * bits;
        std::memset(to, 0, 64 * bits);
        for (int64_t first = 0; first < block_outs; first += lanes) {
          alignas(64) float values[block_inputs * lanes];
          const float* from = weights + ((block * block_outs + first) * groups + group) * block_inputs;
          transpose(from, groups * block_inputs, lanes, block_inputs, values, lanes);
          const Fit<bits> fit(reinterpret_cast<const Lanes*>(values));
          for (int64_t i = 0; i < block_inputs; i++)
            for (int64_t lane = 0; lane < lanes; lane++) put_code<bits>(to, first + lane, i, fit.codes[i][lane]);
          round_to(fit.scale, scales + at * 2 * block_outs + first);
          round_to(fit.least, scales + (at * 2 + 1) * block_outs + first);
        }
      }
  });
}

}  // namespace
