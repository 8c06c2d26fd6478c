// Products of inputs in float32 with codes of few bits, by a processor's matrix units (Intel AMX). A code is a bfloat16
// and an input the sum of three, so that products are exact; sums are in float32. Not so for inputs near 1e-33 and below,
// whose last parts the units take for zero, and for those near 1e36 and above and infinite ones, which give NaN.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "rows.h"

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_MATRIX_UNITS

#include <sys/syscall.h>
#include <unistd.h>

namespace {

// A tile has 16 rows of 64 bytes: 32 bfloat16 of an input, pairs of bfloat16 for 16 outputs, or 16 sums in float32.
constexpr int64_t side = 16, depth = 32, bytes_of_tile = 1024, parts = 3;
constexpr int64_t outs_of_units = 4 * side;  // at a time

// Linux lets a process use them that has asked for it.
bool has_matrix_units() {
  constexpr int request = 0x1023, tile_data = 18;
  static const bool granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return granted;
}

// GCC does not know that instructions read a tile, or its configuration, from memory: what is written before is there.
inline void finish_writing() { asm volatile("" ::: "memory"); }

// Of a thread, which is as before afterwards: oneDNN uses the units too.
class TileConfiguration {
 public:
  TileConfiguration() {
    _tile_storeconfig(before);
    alignas(64) char wanted[64] = {1};
    for (int tile = 0; tile < 8; tile++) wanted[16 + 2 * tile] = 64, wanted[48 + tile] = side;
    finish_writing();
    _tile_loadconfig(wanted);
  }
  ~TileConfiguration() {
    if (before[0])
      _tile_loadconfig(before);
    else
      _tile_release();
  }

 private:
  alignas(64) char before[64];
};

struct Freed {
  void operator()(void* from) const { std::free(from); }
};

template <class Value>
std::unique_ptr<Value, Freed> aligned(int64_t count) {
  const int64_t bytes = (count * sizeof(Value) + 63) / 64 * 64;
  void* found = std::aligned_alloc(64, bytes);
  if (!found) throw std::bad_alloc();
  return std::unique_ptr<Value, Freed>(static_cast<Value*>(found));
}

inline __mmask16 first_of(int64_t count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (1 << count) - 1; }

// The upper halves of 32 floats, which are bfloat16: pairs of the `one` and the `other` of each place.
inline __m512i pairs_of(__m512 one, __m512 other) {
  const __m512i upper = _mm512_set1_epi32(0xFFFF0000);
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(one), 16);
  return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(other), upper, 0xF8);  // low | (other & upper)
}

inline __m512 upper_half(__m512 of) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(of), _mm512_set1_epi32(0xFFFF0000)));
}

// Codes of 64 outputs for 32 inputs: four tiles. A pair is an input and the one 16 further on.
struct CodeTiles {
  const char* tiles;
  const Lanes *scales, *offsets;  // [4] each: weights = codes * scales + offsets. No offsets: null
};

// Blocks of 32 inputs.
struct Slice {
  int64_t begin, end;
};

// An input as tiles: the sum of the tiles of its three parts.
class InputTiles {
 public:
  static constexpr int64_t most_rows = 224, most_blocks = 24;  // of a slice, which is 1 MB: half of a core's cache
  const int64_t rows, width, strips, blocks;

  explicit InputTiles(const Rows& input)
      : rows(input.count), width(input.width), strips((rows + side - 1) / side), blocks((width + depth - 1) / depth),
        tiles(aligned<char>(strips * blocks * parts * bytes_of_tile)), sums_of_blocks(new float[blocks * strips * side]) {
    torch::stable::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * side; row < end * side; row++) split(input.values + row * input.stride, row);
    });
  }

  // Of 64 outputs: [strips, 4, 16, 16].
  std::unique_ptr<float, Freed> new_sums() const { return aligned<float>(strips * 4 * side * side); }

  // Calls `multiply(slice)` for slices of the blocks.
  template <class Multiply>
  void by_slices(Multiply multiply) const {
    const int64_t slices = (blocks + most_blocks - 1) / most_blocks, some = (blocks + slices - 1) / slices;
    for (int64_t block = 0; block < blocks; block += some) multiply(Slice{block, std::min(block + some, blocks)});
  }

  // The products of a block, added to `sums`, or written where they are the first.
  void multiply(int64_t block, const CodeTiles& weights, bool is_first, float* sums) const {
    alignas(64) float found[4][side][side];
    for (int64_t strip = 0; strip < strips; strip++, sums += 4 * side * side) {
      products(tile(strip, block), weights.tiles, found[0][0]);
      const float* of_rows = sums_of_blocks.get() + (block * strips + strip) * side;
      for (int64_t i = 0; i < 4; i++)
        for (int64_t row = 0; row < side; row++) {
          Lanes* to = (Lanes*)sums + i * side + row;
          Lanes added = load(found[i][row]) * weights.scales[i];
          if (weights.offsets) added += of_rows[row] * weights.offsets[i];
          *to = is_first ? added : *to + added;
        }
    }
  }

  // Writes the `sums` of a slice to `out`, and adds to what the slices before it gave.
  void write(const Slice& slice, const float* sums, float* out, int64_t out_stride, int64_t outs) const {
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < 4; i++) {
        const __mmask16 valid = first_of(outs - i * side);
        float* to = out + row * out_stride + i * side;
        Lanes sum = load(sums + ((row / side * 4 + i) * side + row % side) * side);
        if (slice.begin) sum += (Lanes)_mm512_maskz_loadu_ps(valid, to);
        _mm512_mask_storeu_ps(to, valid, (__m512)sum);
      }
  }

 private:
  std::unique_ptr<char, Freed> tiles;       // [strips, blocks, parts]
  std::unique_ptr<float[]> sums_of_blocks;  // [blocks, rows]

  char* tile(int64_t strip, int64_t block) const {
    return tiles.get() + (strip * blocks + block) * parts * bytes_of_tile;
  }

  void split(const float* from, int64_t row) const {
    for (int64_t block = 0; block < blocks; block++, from += depth) {
      const int64_t left = row < rows ? width - block * depth : 0;
      __m512 one = _mm512_maskz_loadu_ps(first_of(left), from);
      __m512 other = _mm512_maskz_loadu_ps(first_of(left - side), from + side);
      sums_of_blocks[block * strips * side + row] = _mm512_reduce_add_ps(_mm512_add_ps(one, other));
      char* to = tile(row / side, block) + row % side * 64;
      for (int part = 0; part < parts; part++, to += bytes_of_tile) {
        _mm512_store_si512(to, pairs_of(one, other));
        one = _mm512_sub_ps(one, upper_half(one)), other = _mm512_sub_ps(other, upper_half(other));
      }
    }
  }

  static void products(const char* inputs, const char* weights, float* to) {
    constexpr int64_t size = side * side;
    finish_writing();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, inputs, 64);
    _tile_loadd(5, inputs + bytes_of_tile, 64);
    _tile_loadd(6, inputs + 2 * bytes_of_tile, 64);
#define ADD_PRODUCTS(sum)                            \
  _tile_loadd(7, weights + sum * bytes_of_tile, 64); \
  _tile_dpbf16ps(sum, 6, 7);                         \
  _tile_dpbf16ps(sum, 5, 7);                         \
  _tile_dpbf16ps(sum, 4, 7)
    ADD_PRODUCTS(0);
    ADD_PRODUCTS(1);
    ADD_PRODUCTS(2);
    ADD_PRODUCTS(3);
#undef ADD_PRODUCTS
    _tile_stored(0, to, 64);
    _tile_stored(1, to + size, 64);
    _tile_stored(2, to + 2 * size, 64);
    _tile_stored(3, to + 3 * size, 64);
  }
};

}  // namespace

#else

namespace {

class InputTiles {
 public:
  static constexpr int64_t most_rows = 0;
};

bool has_matrix_units() { return false; }

}  // namespace

#endif
