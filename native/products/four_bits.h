// Products with codes of 4 bits, in torch's order.
#pragma once

#include <array>

#include "matrix_units.h"
#include "panels.h"

namespace {

// Products with codes of 4 bits, in torch's order: for each block of outputs and each input a byte per two outputs, one
// of the first half of the block and one of the second. weight = (code - 8) * scale + offset.
struct FourBits {
  const float* input;  // [rows, width]
  const uint8_t* packed;
  const uint16_t* scales;  // bfloat16 [width / group, outs, 2]: scale and offset
  float* out;              // [rows, outs]
  int64_t rows, outs, width, group, out_stride;
  int64_t half_block;       // in chunks of `lanes` bytes
  const Panels* panels;     // for many rows, or null
  const InputTiles* tiles;  // instead of panels, or null

  static bool fit_panels(int64_t rows) { return rows >= (lanes == 16 ? 5 : 9); }

  static bool fit_units(int64_t rows, int64_t outs_of_block, int64_t group) {
    return rows >= 4 && outs_of_block == 64 && group % 32 == 0 && has_matrix_units();
  }

  static float as_float(uint32_t bits) {
    float found;
    std::memcpy(&found, &bits, sizeof(found));
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
        fetch_ahead(codes);
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
        uint32_t both;
        std::memcpy(&both, of_group + 2 * one, sizeof(both));
        scale[one] = as_float(both << 16);
        offset[one] = as_float(both & 0xFFFF0000) - 8 * scale[one];
      }
      for (int other = 0; other < some_rows; other++) {
        float found[2 * half];
        std::memcpy(found, sums[other], sizeof(found));
        for (int64_t one = 0; one < 2 * half; one++)
          totals[other][one] += found[one] * scale[one] + inputs[other] * offset[one];
      }
    }
    for (int other = 0; other < some_rows; other++)
      std::memcpy(out + (row + other) * out_stride + first, totals[other], sizeof(totals[other]));
  }

#ifdef __AVX512F__
  // Codes of 4 bits, one in each 32 bits, as `bias + code`: shifted to the end of a mantissa, below the exponent of `bias`,
  // they need no conversion. A negative shift is one to the left.
  template <int shift, int bias>
  static Lanes biased(__m512i codes) {
    constexpr int at = bias == 16 ? 19 : 15;  // the lowest of their bits
    static_assert(bias == 1 << (23 - at));
    const __m512i exponent = _mm512_castps_si512(_mm512_set1_ps(bias));
    const __m512i moved = shift < 0 ? _mm512_slli_epi32(codes, -shift) : _mm512_srli_epi32(codes, shift);
    return (Lanes)_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(15 << at), exponent, 0xEA));  // moved & mask | exponent
  }

  // One row and a block of 64 outputs: 64 bytes have the codes of two inputs, and each 32 bits have eight codes.
  void one_row_of_64(int64_t row, int64_t first) const {
    const float* from = input + row * width;
    const __m512i of_two = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i bytes_0_and_1 = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i bytes_2_and_3 = _mm512_add_epi32(bytes_0_and_1, _mm512_set1_epi32(2));
    const uint8_t* codes = packed + first * width / 2;
    Lanes totals[2][2] = {};  // by half of the block, then by the bytes of the 32 bits
    for (int64_t i = 0; i < width;) {
      const uint16_t* of_group = scales + (i / group * outs + first) * 2;
      Lanes sums[2][4] = {}, inputs = {};
      for (const int64_t end = i + group; i < end; i += 2, codes += 64) {
        fetch_ahead(codes);
        const __m512i eight = _mm512_loadu_si512(codes);
        const __m512i two = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)(from + i)));
        const Lanes values = (Lanes)_mm512_permutexvar_ps(of_two, _mm512_castsi512_ps(two));
        inputs += values;
        sums[0][0] += values * biased<-15, 256>(eight);
        sums[1][0] += values * biased<-15, 16>(eight);
        sums[0][1] += values * biased<-7, 256>(eight);
        sums[1][1] += values * biased<-7, 16>(eight);
        sums[0][2] += values * biased<1, 256>(eight);
        sums[1][2] += values * biased<1, 16>(eight);
        sums[0][3] += values * biased<9, 256>(eight);
        sums[1][3] += values * biased<9, 16>(eight);
      }
      const float of_inputs = inputs[0] + inputs[lanes / 2];
      for (int half = 0; half < 2; half++) {
        const __m512i low = _mm512_loadu_si512(of_group + half * 64), high = _mm512_loadu_si512(of_group + half * 64 + 32);
        for (int pair = 0; pair < 2; pair++) {
          const __m512 one = (__m512)sums[half][2 * pair], other = (__m512)sums[half][2 * pair + 1];
          const Lanes sum = (Lanes)_mm512_shuffle_f32x4(one, other, 0x44) + (Lanes)_mm512_shuffle_f32x4(one, other, 0xEE);
          const __m512i both = _mm512_permutex2var_epi32(low, pair ? bytes_2_and_3 : bytes_0_and_1, high);
          const Lanes scale = (Lanes)_mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
          const Lanes offset = (Lanes)_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xFFFF0000)));
          const float bias = half == 0 ? 256 : 16;
          totals[half][pair] += (sum - (bias + 8) * of_inputs) * scale + of_inputs * offset;
        }
      }
    }
    float* to = out + row * out_stride + first;
    for (int half = 0; half < 2; half++)
      for (int pair = 0; pair < 2; pair++)
        for (int one = 0; one < 16; one++)
          to[half * 32 + one % 8 * 4 + one / 8 + 2 * pair] = totals[half][pair][one];
  }
#elif defined(__AVX2__)
  // Some rows and halves of a block of 32 outputs: 32 bytes have the codes of two inputs, and each 32 bits four codes of
  // either half. They are converted where they are, as multiples of 256 and so on.
  template <int some_rows, int begin, int end>
  void halves_of_32(int64_t row, int64_t first) const {
    const float* from = input + row * width;
    const uint8_t* codes = packed + first * width / 2;
    Lanes totals[some_rows][2][2] = {};
    for (int64_t i = 0; i < width;) {
      const uint16_t* of_group = scales + (i / group * outs + first) * 2;
      float inputs[some_rows];
      for (int other = 0; other < some_rows; other++) inputs[other] = sum_of(from + other * width + i, group);
      Lanes sums[some_rows][2][4] = {};  // by half, then by the bytes of the 32 bits
      for (const int64_t last = i + group; i < last; i += 2, codes += 32) {
        if (begin == 0 && i % 4 == 0) fetch_ahead(codes);
        const __m256i eight = _mm256_loadu_si256((const __m256i*)codes);
        Lanes values[some_rows];
        for (int other = 0; other < some_rows; other++) {
          const float* two = from + other * width + i;
          values[other] = (Lanes)_mm256_blend_ps(_mm256_broadcast_ss(two), _mm256_broadcast_ss(two + 1), 0xF0);
        }
        for (int half = begin; half < end; half++) {
          const __m256i four = half == 0 ? eight : _mm256_srli_epi32(eight, 4);
          for (int byte = 0; byte < 4; byte++) {
            const __m256i one = _mm256_and_si256(four, _mm256_set1_epi32(15 << (8 * byte)));
            const Lanes weights = (Lanes)_mm256_cvtepi32_ps(one);
            for (int other = 0; other < some_rows; other++) sums[other][half][byte] += values[other] * weights;
          }
        }
      }
#pragma GCC unroll 2  // otherwise the sums are kept in memory
      for (int half = begin; half < end; half++)
#pragma GCC unroll 3
        for (int other = 0; other < some_rows; other++) {
          __m128 parts[4];  // of each byte, then of four outputs in a row
#pragma GCC unroll 4
          for (int byte = 0; byte < 4; byte++) {
            const __m256 both = (__m256)sums[other][half][byte];
            const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
            parts[byte] = _mm_mul_ps(sum, _mm_set1_ps(1.0f / (1 << (8 * byte))));
          }
          _MM_TRANSPOSE4_PS(parts[0], parts[1], parts[2], parts[3]);
          for (int pair = 0; pair < 2; pair++) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(of_group + half * 32 + pair * 16));
            const Lanes scale = (Lanes)_mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            const Lanes offset = (Lanes)_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xFFFF0000)));
            const Lanes sum = (Lanes)_mm256_set_m128(parts[2 * pair + 1], parts[2 * pair]);
            totals[other][half][pair] += (sum - 8 * inputs[other]) * scale + inputs[other] * offset;
          }
        }
    }
    for (int other = 0; other < some_rows; other++)
      for (int half = begin; half < end; half++)
        std::memcpy(out + (row + other) * out_stride + first + half * 16, totals[other][half], 2 * sizeof(Lanes));
  }

  static float sum_of(const float* from, int64_t count) {
    Lanes sums = {};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) sums += load(from + i);
    float found = total(sums);
    for (; i < count; i++) found += from[i];
    return found;
  }

  // The sums of two rows and more fit the registers one half at a time.
  template <int some_rows>
  void rows_of_32(int64_t row, int64_t first) const {
    if constexpr (some_rows == 1) {
      halves_of_32<1, 0, 2>(row, first);
    } else {
      halves_of_32<some_rows, 0, 1>(row, first);
      halves_of_32<some_rows, 1, 2>(row, first);
    }
  }
#endif

  int64_t shares() const { return outs / (2 * half_block * lanes); }

  bool has_small_shares() const { return false; }

  // Of the vectors of outputs in a block, for the group of the input `i`.
  template <int vectors>
  void scales_of(int64_t first, int64_t i, Lanes (&scale)[vectors], Lanes (&offset)[vectors]) const {
    typedef uint32_t Pairs __attribute__((vector_size(4 * lanes)));
    const uint16_t* of_group = scales + (i / group * outs + first) * 2;
    for (int v = 0; v < vectors; v++) {
      Pairs both;
      std::memcpy(&both, of_group + 2 * v * lanes, sizeof(both));
      scale[v] = (Lanes)(both << 16), offset[v] = (Lanes)(both & 0xFFFF0000);
    }
  }

  // The weights of a block of outputs in full, for the inputs of a group: [chunks, group, 2 vectors].
  template <int chunks>
  void decode(int64_t first, int64_t i, float* to) const {
    Lanes scale[2 * chunks], offset[2 * chunks];
    scales_of(first, i, scale, offset);
    for (int v = 0; v < 2 * chunks; v++) offset[v] -= 8 * scale[v];
    const uint8_t* codes = packed + first * width / 2 + i * chunks * lanes;
    for (int64_t k = 0; k < group; k++, codes += chunks * lanes)
      for (int chunk = 0; chunk < chunks; chunk++) {
        const std::array<Lanes, 2> both = halves(codes + chunk * lanes);
        for (int half = 0; half < 2; half++) {
          const int v = half * chunks + chunk;
          const Lanes weights = both[half] * scale[v] + offset[v];
          std::memcpy(to + ((v / 2 * group + k) * 2 + v % 2) * lanes, &weights, sizeof(weights));
        }
      }
  }

  template <int chunks>
  void by_panels(int64_t from, int64_t to) const {
    constexpr int64_t outs_of_panel = 2 * lanes, outs_of_block = chunks * outs_of_panel;
    std::unique_ptr<float[]> weights(new float[outs_of_block * group]);
    for (int64_t first = from * outs_of_block; first < to * outs_of_block; first += outs_of_block)
      for (int64_t i = 0; i < width; i += group) {
        decode<chunks>(first, i, weights.get());
        for (int64_t panel = 0; panel < chunks; panel++)
          panels->multiply(weights.get() + panel * group * outs_of_panel, i, group, out + first + panel * outs_of_panel,
                           out_stride);
      }
  }

#ifdef HAS_MATRIX_UNITS
  // The codes of a block of 64 outputs as tiles, for the inputs of a group.
  void decode_tiles(int64_t first, int64_t i, char* to) const {
    alignas(64) uint16_t of_codes[32];  // as bfloat16, by the lowest five bits
    for (int code = 0; code < 32; code++) {
      const float weight = code % 16 - 8;
      std::memcpy(&of_codes[code], reinterpret_cast<const char*>(&weight) + 2, 2);
    }
    const __m512i table = _mm512_load_si512(of_codes);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking sorts outputs into tiles
    for (int64_t block = 0; block < group / depth; block++, to += 4 * bytes_of_tile)
      for (int64_t pair = 0; pair < side; pair++) {
        __m512i found[2][2];  // by input, then by half of the block
        for (int one = 0; one < 2; one++) {
          const uint8_t* codes = packed + first * width / 2 + (i + block * depth + one * side + pair) * 32;
          const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i*)codes), order);
          const __m512i both = _mm512_cvtepu8_epi16(bytes);
          found[one][0] = _mm512_permutexvar_epi16(both, table);
          found[one][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
        }
        for (int half = 0; half < 2; half++) {
          char* of_half = to + 2 * half * bytes_of_tile + pair * 64;
          _mm512_store_si512(of_half, _mm512_unpacklo_epi16(found[0][half], found[1][half]));
          _mm512_store_si512(of_half + bytes_of_tile, _mm512_unpackhi_epi16(found[0][half], found[1][half]));
        }
      }
  }

  void by_units(int64_t from, int64_t to) const {
    const TileConfiguration configuration;
    const int64_t of_group = group / depth;
    const auto decoded = aligned<char>(of_group * 4 * bytes_of_tile);
    const auto sums = tiles->new_sums();
    tiles->by_slices(of_group, [&](const Slice& slice) {
      for (int64_t first = from * outs_of_units; first < to * outs_of_units; first += outs_of_units) {
        for (int64_t block = slice.begin; block < slice.end; block += of_group) {
          Lanes scale[4], offset[4];
          scales_of(first, block * depth, scale, offset);
          decode_tiles(first, block * depth, decoded.get());
          tiles->multiply(slice, block, of_group, {decoded.get(), scale, offset}, sums.get());
        }
        tiles->write(slice, sums.get(), nullptr, out + first, out_stride, outs_of_units);
      }
    });
  }
#endif

  void compute(int64_t from, int64_t to) const {
    half_block == 1 ? blocks<1>(from, to) : half_block == 2 ? blocks<2>(from, to) : blocks<4>(from, to);
  }

  template <int some_rows, int chunks>
  void some(int64_t row, int64_t first) const {
#if defined(__AVX512F__)
    if constexpr (some_rows == 1 && chunks == 2) return one_row_of_64(row, first);
#elif defined(__AVX2__)
    if constexpr (chunks == 2) return rows_of_32<some_rows>(row, first);
#endif
    block<some_rows, chunks>(row, first);
  }

  template <int chunks>
  void blocks(int64_t from, int64_t to) const {
#ifdef HAS_MATRIX_UNITS
    if (tiles) return by_units(from, to);
#endif
    if (panels) return by_panels<chunks>(from, to);
    constexpr int at_once = lanes == 16 ? 4 : 3;
    for (int64_t one = from; one < to; one++) {
      const int64_t first = one * 2 * chunks * lanes;
      for (int64_t row = 0, size; row < rows; row += size) {
        const int64_t left = rows - row;
        // Never the last of several alone: one row is added up in another order, and equal rows have equal products.
        size = left == at_once + 1 ? at_once - 1 : std::min<int64_t>(left, at_once);
        if (size == at_once) some<at_once, chunks>(row, first);
        if (size == 3 && at_once > 3) some<3, chunks>(row, first);
        if (size == 2) some<2, chunks>(row, first);
        if (size == 1) some<1, chunks>(row, first);
      }
    }
  }
};

}  // namespace
