// Products of many rows with codes of 8 bits, by matrix units.
#pragma once

#include "matrix_units.h"

#ifdef HAS_MATRIX_UNITS

namespace {

struct EightBits {
  static constexpr int64_t least_rows = 12;  // with fewer the plain product is faster
  static constexpr int64_t at_once = 4;      // blocks whose tiles fit the processor's nearest cache

  const InputTiles* input;
  const int8_t* codes;  // [outs, width]
  const float* scales;  // [outs]
  float* out;           // [rows, outs]
  int64_t outs, codes_stride, out_stride;

  int64_t shares() const { return (outs + outs_of_units - 1) / outs_of_units; }

  bool has_small_shares() const { return false; }

  void compute(int64_t from, int64_t to) const {
    const TileConfiguration configuration;
    alignas(64) char decoded[at_once * 4 * bytes_of_tile];
    const auto sums = input->new_sums();
    input->by_slices(at_once, [&](const Slice& slice) {
      for (int64_t first = from * outs_of_units; first < std::min(to * outs_of_units, outs); first += outs_of_units) {
        for (int64_t block = slice.begin; block < slice.end; block += at_once) {
          const int64_t some = std::min(at_once, slice.end - block);
          for (int64_t one = 0; one < some; one++)
            for (int64_t i = 0; i < 4; i++)
              decode(first + i * side, (block + one) * depth, decoded + (one * 4 + i) * bytes_of_tile);
          input->multiply(slice, block, some, {decoded, nullptr, nullptr}, sums.get());
        }
        Lanes scale[4];
        for (int64_t i = 0; i < 4; i++)
          scale[i] = (Lanes)_mm512_maskz_loadu_ps(first_of(outs - first - i * side), scales + first + i * side);
        input->write(slice, sums.get(), scale, out + first, out_stride, outs - first);
      }
    });
  }

  void decode(int64_t first, int64_t i, char* to) const {
    const __mmask16 low = first_of(input->width - i), high = first_of(input->width - i - side);
    __m512i rows[16] = {};
    for (int64_t row = 0; row < std::min(side, outs - first); row++) {
      const int8_t* from = codes + (first + row) * codes_stride + i;
      __builtin_prefetch(from + at_once * depth, 0, 2);
      const __m512 one = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(low, from)));
      const __m512 other = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(high, from + side)));
      rows[row] = pairs_of(one, other);
    }
    swap_sides(rows);
    for (int row = 0; row < 16; row++) _mm512_store_si512(to + row * 64, rows[row]);
  }
};

}  // namespace

#endif
