// Products with codes in blocks.
#pragma once

#include <cmath>
#include <memory>

#include "codes.h"
#include "matrix_units.h"

namespace {

// What makes weights of the codes of an output in a group.
enum class Form { scale, scale_and_least, scale_of_each_half };

// With integers, each group of 32 inputs is a scale times integers of so many bytes: of three, with the error of a
// float32, or of one.
constexpr int exact_parts = 3, rounded_parts = 1;

// An input for products with codes, of which the last group is filled up with zeros.
class BlockInput {
 public:
  static constexpr int64_t most_rows = 256;
#ifdef __AVX512VNNI__
  static constexpr bool has_integers = true;
#else
  static constexpr bool has_integers = false;
#endif
  const int64_t rows, groups;
  const int parts;

  BlockInput(const Rows& input, int parts)
      : rows(input.count), groups((input.width + block_inputs - 1) / block_inputs), parts(parts),
        sums(new float[rows * groups * spans]) {
#ifdef __AVX512VNNI__
    bytes.reset(new int8_t[rows * groups * parts * block_inputs]);
    totals.reset(new int32_t[rows * groups * spans * parts]);
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

  // span: 0 is the group, 1 its first half, 2 the other.
  float sum(int64_t row, int64_t group, int span = 0) const { return sums[(row * groups + group) * spans + span]; }

#ifdef __AVX512VNNI__
  const int8_t* bytes_of(int64_t row, int64_t group) const {
    return bytes.get() + (row * groups + group) * parts * block_inputs;
  }
  const int32_t* totals_of(int64_t row, int64_t group, int span) const {
    return totals.get() + ((row * groups + group) * spans + span) * parts;
  }
  float scale(int64_t row, int64_t group) const { return scales[row * groups + group]; }
#else
  const float* values(int64_t row, int64_t group) const { return filled.get() + (row * groups + group) * block_inputs; }
#endif

 private:
  static constexpr int spans = 3;
  std::unique_ptr<float[]> sums;  // [rows, groups, spans]
#ifdef __AVX512VNNI__
  std::unique_ptr<int8_t[]> bytes;  // [rows, groups, parts, 32], the highest first
  std::unique_ptr<int32_t[]> totals;  // [rows, groups, spans, parts]
  std::unique_ptr<float[]> scales;

  void read(const float* from, int64_t at) {
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const float largest = 127 << 8 * (parts - 1);
    const float inverse = most > 1e-30f ? largest / most : 0;
    sums[at * spans] = sum;  // the middle of codes is taken from the integers, and needs no sums of halves
    scales[at] = std::isfinite(sum) && std::isfinite(most) ? (inverse ? most / largest : 0) : NAN;
    __m512i integers[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(inverse))),
                           _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(inverse)))};
    for (int part = parts - 1; part >= 0; part--) {
      int8_t* to = bytes.get() + (at * parts + part) * block_inputs;
      int32_t* total = totals.get() + at * spans * parts + part;
      for (int half = 0; half < 2; half++) {  // the lowest byte, from -128 to 127, and what is left of the integers
        const __m512i byte = _mm512_srai_epi32(_mm512_slli_epi32(integers[half], 24), 24);
        integers[half] = _mm512_srai_epi32(_mm512_sub_epi32(integers[half], byte), 8);
        total[(half + 1) * parts] = _mm512_reduce_add_epi32(byte);
        _mm_storeu_si128((__m128i*)(to + half * 16), _mm512_cvtepi32_epi8(byte));
      }
      total[0] = total[parts] + total[2 * parts];
    }
  }
#else
  std::unique_ptr<float[]> filled;  // [rows, groups, 32]

  void read(const float* from, int64_t at) {
    std::memcpy(filled.get() + at * block_inputs, from, block_inputs * sizeof(float));
    constexpr int64_t half = block_inputs / 2;
    for (int span = 1; span <= 2; span++, from += half) {
      Lanes added = {};
      for (int64_t i = 0; i < half; i += lanes) added += load(from + i);
      sums[at * spans + span] = total(added);
    }
    sums[at * spans] = sums[at * spans + 1] + sums[at * spans + 2];
  }
#endif
};

// Outputs of weights with codes.
struct BlockProduct {
  BlockCodes weights;
  const BlockInput* input;   // or null
  const InputTiles* tiles;   // instead, or null
  float* out;                // [rows, outs]
  int64_t out_stride;

  int64_t shares() const { return tiles ? (weights.blocks + 3) / 4 : weights.blocks; }

  bool has_small_shares() const { return false; }

  void compute(int64_t from, int64_t to) const;
};

template <int bits>
struct ProductOfBits : BlockProduct {
  static constexpr int64_t bytes_of_group = 64 * bits;

  void compute(int64_t from, int64_t to) const {
#ifdef HAS_MATRIX_UNITS
    if (tiles) return by_units(from, to);
#endif
    for (int64_t block = from; block < to; block++) {
      if (weights.has_least)
        rows_of<Form::scale_and_least>(block);
      else if (!weights.has_halves())
        rows_of<Form::scale>(block);
      else if constexpr (bits == bits_of_halves)
        rows_of<Form::scale_of_each_half>(block);
    }
  }

 private:
  const uint8_t* codes_of(int64_t block, int64_t group) const {
    return weights.codes + (block * weights.groups + group) * bytes_of_group;
  }

  // What is read ahead while a quad is multiplied: in turn the lines of a group.
  ALWAYS_INLINE static void fetch_ahead_of(const uint8_t* codes, int quad) {
    if (quad * bits % 8 < bits) fetch_ahead(codes + quad * bits / 8 * bytes_of_line);
  }

  // Of the middle code: multiples of it lose less when they are added up than those of the least weight.
  Lanes offset_of(Lanes scale, int64_t block, int64_t group, int64_t vector) const {
    return scale * float(middle_of(bits)) + weights.scale(block, group, 1, vector);
  }

  template <Form form>
  void rows_of(int64_t block) const {
    if constexpr (BlockInput::has_integers)
      if (input->parts == rounded_parts) return rows_of<form, rounded_parts>(block);
    rows_of<form, exact_parts>(block);
  }

  template <Form form, int parts>
  void rows_of(int64_t block) const {
    constexpr int most = at_once<parts>;
    for (int64_t row = 0; row < input->rows; row += most) some_rows<most, form, parts>(row, block);
  }

  template <int some, Form form, int parts>
  void some_rows(int64_t row, int64_t block) const {
    if constexpr (some > 1)
      if (input->rows - row < some) return some_rows<some - 1, form, parts>(row, block);
    for (int64_t vector = 0; vector < vectors_of_block; vector++) tile<some, form, parts>(row, block, vector);
  }

  template <int some>
  void write(const Lanes* sums, int64_t row, int64_t block, int64_t vector) const {
    float* to = out + row * out_stride + block * block_outs + vector * lanes;
    for (int other = 0; other < some; other++) store(sums[other], to + other * out_stride);
  }

#ifdef __AVX512VNNI__
  template <int parts>
  static constexpr int at_once = parts == rounded_parts ? 10 : 6;  // whose sums stay in registers

  template <int some, Form form, int parts>
  void tile(int64_t row, int64_t block, int64_t vector) const {
    constexpr int halves = form == Form::scale_of_each_half ? 2 : 1;
    constexpr bool has_least = form == Form::scale_and_least;
    Lanes sums[some] = {};
    for (int64_t group = 0; group < weights.groups; group++) {
      const uint8_t* codes = codes_of(block, group);
#pragma GCC unroll 2
      for (int half = 0; half < halves; half++) {
        __m512i found[some][parts];
        for (int other = 0; other < some; other++) {
          const int32_t* totals = input->totals_of(row + other, group, halves == 1 ? 0 : half + 1);
          for (int part = 0; part < parts; part++)
            found[other][part] = _mm512_set1_epi32(-middle_of(bits) * totals[part]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8 / halves; i++) {
          const int quad = half * 4 + i;
          fetch_ahead_of(codes, quad);
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
        const __m512 scale = (__m512)weights.scale(block, group, half);
        const Lanes offset = has_least ? offset_of((Lanes)scale, block, group, 0) : Lanes{};
        for (int other = 0; other < some; other++) {
          __m512 sum = _mm512_cvtepi32_ps(found[other][0]);
          if constexpr (parts == exact_parts) {
            const __m512i rest = _mm512_add_epi32(_mm512_slli_epi32(found[other][1], 8), found[other][2]);
            sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(65536), _mm512_cvtepi32_ps(rest));
          }
          const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(input->scale(row + other, group)));
          sums[other] = (Lanes)_mm512_fmadd_ps(sum, by, (__m512)sums[other]);
          if (has_least) add_product(sums[other], offset, input->sum(row + other, group) + Lanes{});
        }
      }
    }
    write<some>(sums, row, block, vector);
  }
#else
  template <int parts>
  static constexpr int at_once = lanes == 16 ? 6 : 3;

  template <int some, Form form, int parts>
  void tile(int64_t row, int64_t block, int64_t vector) const {
    constexpr int halves = form == Form::scale_of_each_half ? 2 : 1;
    constexpr bool has_least = form == Form::scale_and_least;
    Lanes sums[some] = {};
    for (int64_t group = 0; group < weights.groups; group++) {
      const uint8_t* codes = codes_of(block, group);
#pragma GCC unroll 2
      for (int half = 0; half < halves; half++) {
        const Lanes scale = weights.scale(block, group, half, vector);
        const Lanes offset = has_least ? offset_of(scale, block, group, vector) : Lanes{};
        Lanes found[some][4] = {};  // by the byte of the code, whose value is 256, 65536 ... times as large
#pragma GCC unroll 8
        for (int i = 0; i < 8 / halves; i++) {
          const int quad = half * 4 + i;
          if (vector == 0) fetch_ahead_of(codes, quad);
          const Words four = quad_of<bits>(codes, quad, vector);
#pragma GCC unroll 4
          for (int byte = 0; byte < 4; byte++) {
            const bool is_shifted = bits == 8 && byte == 3;  // it would be negative
            const Lanes weight = as_floats(is_shifted ? four >> 24 : four & (0xFFu << 8 * byte));
            for (int other = 0; other < some; other++)
              add_product(found[other][byte], weight, input->values(row + other, group)[quad * 4 + byte] + Lanes{});
          }
        }
        for (int other = 0; other < some; other++) {
          Lanes sum = found[other][0] + found[other][1] * 0x1p-8f + found[other][2] * 0x1p-16f +
                      found[other][3] * (bits == 8 ? 1 : 0x1p-24f);
          const float of_inputs = input->sum(row + other, group, halves == 1 ? 0 : half + 1);
          add_product(sums[other], sum - middle_of(bits) * of_inputs, scale);
          if (has_least) add_product(sums[other], offset, of_inputs + Lanes{});
        }
      }
    }
    write<some>(sums, row, block, vector);
  }
#endif

#ifdef HAS_MATRIX_UNITS
  // 64 outputs: four blocks of 16, the last of which there may be fewer of. A group whose halves have other scales is
  // multiplied twice, with zeros for a half.
  void by_units(int64_t from, int64_t to) const {
    const TileConfiguration configuration;
    alignas(64) char decoded[4 * bytes_of_tile];
    const auto sums = tiles->new_sums();
    const int halves = weights.has_halves() ? 2 : 1;
    tiles->by_slices([&](const Slice& slice) {
      for (int64_t four = from; four < to; four++) {
        for (int64_t group = slice.begin; group < slice.end; group++)
          for (int half = 0; half < halves; half++) {
            Lanes scale[4] = {}, offset[4] = {};
            for (int64_t i = 0; i < 4; i++) {
              const int64_t block = std::min(4 * four + i, weights.blocks - 1);  // one twice instead of none
              scale[i] = weights.scale(block, group, half);
              if (weights.has_least) offset[i] = offset_of(scale[i], block, group, 0);
              const bool has_first = halves == 1 || half == 0, has_second = halves == 1 || half == 1;
              decode_tile(codes_of(block, group), has_first, has_second, decoded + i * bytes_of_tile);
            }
            const bool is_first = group == slice.begin && half == 0;
            tiles->multiply(group, {decoded, scale, weights.has_least ? offset : nullptr}, is_first, sums.get());
          }
        const int64_t first = four * outs_of_units;
        tiles->write(slice, sums.get(), out + first, out_stride, weights.blocks * block_outs - first);
      }
    });
  }

  // A row of a tile has a pair of inputs for each output, of which one is 16 further on than the other.
  void decode_tile(const uint8_t* codes, bool has_first, bool has_second, char* to) const {
    const __m512 middle = _mm512_set1_ps(middle_of(bits));
    const __mmask16 first = has_first ? 0xFFFF : 0, second = has_second ? 0xFFFF : 0;
    for (int quad = 0; quad < 4; quad++) {
      const Words low = quad_of<bits>(codes, quad, 0), high = quad_of<bits>(codes, quad + 4, 0);
      for (int byte = 0; byte < 4; byte++) {
        const __m512 one = (__m512)as_floats((low >> 8 * byte) & 0xFF);
        const __m512 other = (__m512)as_floats((high >> 8 * byte) & 0xFF);
        const __m512i pairs =
            pairs_of(_mm512_maskz_sub_ps(first, one, middle), _mm512_maskz_sub_ps(second, other, middle));
        _mm512_store_si512(to + (quad * 4 + byte) * 64, pairs);
      }
    }
  }
#endif
};

inline void BlockProduct::compute(int64_t from, int64_t to) const {
  with_bits(weights.bits, [&](auto bits) { ProductOfBits<bits>{*this}.compute(from, to); });
}

}  // namespace
