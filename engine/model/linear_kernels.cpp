// Products with the weights of a linear layer. With few rows they are read once, at memory bandwidth.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in 2 s, ATen's headers in 7 s
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

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
// AMD Zen 4 computes a vector of 64 bytes in two halves; compilers that do not know it take it for Zen 2 or 3.
#if defined(__AVX512F__) && !defined(__znver2__) && !defined(__znver3__) && !defined(__znver4__)
constexpr bool full_width = true;
#else
constexpr bool full_width = false;
#endif
// The sums of a tile stay in registers: there are 32 with AVX-512, otherwise 16.
constexpr int outs_at_once = full_width ? 6 : 4, rows_at_once = full_width ? 4 : lanes == 16 ? 6 : 2;
constexpr int outs_of_tile = lanes == 16 && !full_width ? 8 : 24;
constexpr int streams = full_width ? 12 : 8;  // of weights, for one row: AMD Zen 4 alone reads one faster
// Rows that are computed as columns, in groups of two vectors or less.
constexpr int64_t most_of_group = 2 * lanes;
constexpr int64_t always_columns = lanes == 16 ? 32 : 10;  // from so many rows on
constexpr int64_t most_at_once = 512;  // rows: the columns of more would take much memory
constexpr bool fetches_columns = lanes == 16;  // AMD Zen 3 is slower with it, most where the width is a power of two
constexpr int64_t lanes_for(int64_t rows) { return (rows + 7) / 8 * 8; }
constexpr int64_t group_at(int64_t row, int64_t rows) {
  int64_t size = most_of_group;
  while (size > 8 && row + size > lanes_for(rows)) size /= 2;
  return size;
}
// The first rows, which are computed as columns: at full width whole groups, otherwise all where they fill the lanes or
// lack few of them.
constexpr int64_t rows_as_columns(int64_t rows) {
  if (full_width) return rows / most_of_group * most_of_group;
  return rows < always_columns && rows * 8 < lanes_for(rows) * 7 ? 0 : rows;
}
typedef float Lanes __attribute__((vector_size(4 * lanes)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

static_assert(outs_of_tile % outs_at_once == 0 && outs_of_tile % streams == 0);
constexpr int64_t bytes_of_line = 64, bytes_ahead = 4096;
inline void fetch_ahead(const void* from) { __builtin_prefetch(static_cast<const char*>(from) + bytes_ahead, 0, 2); }

template <class Vector = Lanes>
inline Vector load(const float* from) {
  Vector found;
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

// In one instruction: GCC on AMD Zen takes two where there is one sum only, and then equal rows have other products.
#if defined(__AVX2__) && defined(__FMA__)
inline void add_product(Eight& sum, Eight one, Eight other) {
  sum = (Eight)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
}
#ifdef __AVX512F__
inline void add_product(Lanes& sum, Lanes one, Lanes other) {
  sum = (Lanes)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
}
#endif
inline void add_product(float& sum, float one, float other) { sum = __builtin_fmaf(one, other, sum); }
#else
template <class Value>
inline void add_product(Value& sum, Value one, Value other) {
  sum += one * other;
}
#endif

inline float sum(Lanes values) {
  Quarter parts[lanes / 4];
  std::memcpy(parts, &values, sizeof(values));
  for (int64_t part = 1; part < lanes / 4; part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

// The sums of four vectors.
inline Quarter sums_of(Lanes one, Lanes two, Lanes three, Lanes four) {
#ifdef __AVX512F__
  const __m512 a = (__m512)one, b = (__m512)two, c = (__m512)three, d = (__m512)four;
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Lanes abcd = (Lanes)_mm512_shuffle_ps(ab, cd, 0x44) + (Lanes)_mm512_shuffle_ps(ab, cd, 0xEE);
  Eight halves[2];
  std::memcpy(halves, &abcd, sizeof(abcd));
  const Eight both = halves[0] + halves[1];
  Quarter parts[2];
  std::memcpy(parts, &both, sizeof(both));
  return parts[0] + parts[1];
#else
  return Quarter{sum(one), sum(two), sum(three), sum(four)};
#endif
}

template <int count>
inline void sum_each(const Lanes* vectors, float* totals) {
  int at = 0;
  for (; at + 4 <= count; at += 4) {
    const Quarter four = sums_of(vectors[at], vectors[at + 1], vectors[at + 2], vectors[at + 3]);
    std::memcpy(totals + at, &four, sizeof(four));
  }
  // In the order of the others: equal rows have equal sums.
  for (; at < count; at++) totals[at] = sums_of(vectors[at], vectors[at], vectors[at], vectors[at])[0];
}

// A product of matrices: input [rows, width] and weight [outs, width], the width contiguous -> out [rows, outs], whose
// rows are `out_stride` apart.
template <class Weight>
struct Product {
  const float* input;
  const Weight* weight;
  const float* scales;  // by which outputs are multiplied, or null
  float* out;
  int64_t rows, outs, width, input_stride, weight_stride, out_stride;
  const float* columns;  // see `columns_of`

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
        for (int one = 0; one < some_outs; one++) add_product(sums[other][one], values, weights[one]);
      }
    }
    float totals[some_rows][some_outs];
    sum_each<some_rows * some_outs>(sums[0], totals[0]);
    if (i < width)
      for (int other = 0; other < some_rows; other++)
        for (int one = 0; one < some_outs; one++)
          for (int64_t rest = i; rest < width; rest++)
            add_product(totals[other][one], from[other * input_stride + rest],
                        static_cast<float>(by[one * weight_stride + rest]));
    for (int one = 0; one < some_outs; one++) {
      const float scale = scales ? scales[first + one] : 1;
      for (int other = 0; other < some_rows; other++)
        out[(row + other) * out_stride + first + one] = totals[other][one] * scale;
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
  void all_rows(int64_t row, int64_t first, const Weight* fetched) const {
    const int64_t passes = (rows - row + rows_at_once - 1) / rows_at_once;
    int64_t pass = 0;
    for (; row + rows_at_once <= rows; row += rows_at_once)
      tile<rows_at_once, some_outs>(row, first, fetched, pass++, passes);
    rest<rows_at_once - 1, some_outs>(row, first, fetched, pass, passes);
  }

  // The rows from `row` on, and the outputs from `first` to `end`.
  void by_rows(int64_t row, int64_t first, int64_t end) const {
    for (; first + outs_at_once <= end; first += outs_at_once) {
      const int64_t next = first + outs_at_once;
      const bool fetches = row == 0 && next + outs_at_once <= end;
      all_rows<outs_at_once>(row, first, fetches ? weight + next * weight_stride : nullptr);
    }
    for (; first < end; first++) all_rows<1>(row, first, nullptr);
  }

  // Outputs of the group of rows from `row` on: their inputs are a vector or two, multiplied with a weight at a time.
  template <class Vector, int vectors, int some_outs>
  void column_tile(int64_t row, int64_t first, const Weight* fetched) const {
    constexpr int64_t each = sizeof(Vector) / sizeof(float);
    const Weight* by = weight + first * weight_stride;
    const float* from = columns + row * width;
    Vector sums[some_outs][vectors] = {};
    for (int64_t i = 0; i < width; i++, from += vectors * each) {
      if (fetches_columns && fetched && i % lanes == 0)
        for (int one = 0; one < some_outs; one++) __builtin_prefetch(fetched + one * weight_stride + i, 0, 2);
      Vector values[vectors];
      for (int v = 0; v < vectors; v++) values[v] = load<Vector>(from + v * each);
      for (int one = 0; one < some_outs; one++)
        for (int v = 0; v < vectors; v++) add_product(sums[one][v], values[v], by[one * weight_stride + i] + Vector{});
    }
    float found[some_outs][vectors * each];
    std::memcpy(found, sums, sizeof(found));
    const int64_t count = std::min(rows - row, vectors * each);
    for (int64_t other = 0; other < count; other++)
      for (int one = 0; one < some_outs; one++) out[(row + other) * out_stride + first + one] = found[one][other];
  }

  template <class Vector, int vectors>
  void columns_of_tile(int64_t row, int64_t first, int64_t end) const {
    constexpr int at_once = lanes == 16 || vectors == 1 ? 8 : 6;
    for (; first + at_once <= end; first += at_once) {
      const int64_t next = first + outs_of_tile;
      const bool fetches = row == 0 && next + at_once <= outs;
      column_tile<Vector, vectors, at_once>(row, first, fetches ? weight + next * weight_stride : nullptr);
    }
    for (; first < end; first++) column_tile<Vector, vectors, 1>(row, first, nullptr);
  }

  int64_t tiles() const { return (outs + outs_of_tile - 1) / outs_of_tile; }

  // With more rows or smaller weights, taking a share costs more than it saves.
  bool has_small_shares() const { return rows == 1 && sizeof(Weight) == sizeof(float); }

  // One output of one row. Its weights are one stream, which AMD Zen 4 reads ahead better than four.
  float dot(const Weight* by) const {
    constexpr int at_once = 4;
    Lanes sums[at_once] = {};
    int64_t i = 0;
    for (; i + at_once * lanes <= width; i += at_once * lanes)
      for (int one = 0; one < at_once; one++) {
        const int64_t at = i + one * lanes;
        if (one * lanes * sizeof(Weight) % bytes_of_line == 0) fetch_ahead(by + at);
        sums[one] += load(input + at) * load(by + at);
      }
    for (; i + lanes <= width; i += lanes) sums[0] += load(input + i) * load(by + i);
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) total += input[i] * static_cast<float>(by[i]);
    return total;
  }

  void compute(int64_t from, int64_t to) const {
    int64_t first = from * outs_of_tile;
    const int64_t end = std::min(to * outs_of_tile, outs);
    if (rows == 1) {
      if ((full_width || lanes == 8) && sizeof(Weight) == sizeof(float))
        for (; first + streams <= end; first += streams) tile<1, streams>(0, first, nullptr);
      for (; first < end; first++) {
        const float total = dot(weight + first * weight_stride);
        out[first] = scales ? total * scales[first] : total;
      }
      return;
    }
    if (!columns) return by_rows(0, first, end);
    const int64_t count = rows_as_columns(rows);
    if constexpr (sizeof(Weight) == sizeof(float))
      for (; first < end; first += outs_of_tile) {  // whose weights come from memory once, for all rows
        const int64_t last = std::min(first + outs_of_tile, end);
        by_columns(count, first, last);
        if (count < rows) by_rows(count, first, last);
      }
  }

  void by_columns(int64_t count, int64_t first, int64_t end) const {
    for (int64_t row = 0, size; row < count; row += size) {
      size = group_at(row, count);
      if (size == 32)
        columns_of_tile<Lanes, 32 / lanes>(row, first, end);
      else if (size == 16)
        columns_of_tile<Lanes, 16 / lanes>(row, first, end);
      else
        columns_of_tile<Eight, 1>(row, first, end);
    }
  }
};

// From [rows, width], whose rows are `stride` apart, to [width, side]: zeros where there are no rows.
inline void transpose(const float* from, int64_t stride, int64_t rows, int64_t width, float* to, int64_t side) {
  int64_t row = 0;
#ifdef __AVX2__
  // Lines of the processor's cache are read as wholes: those of several rows may exclude each other.
  constexpr int64_t line = bytes_of_line / sizeof(float);
  const int64_t fours = rows / 4 * 4, lines = width / line * line;
  for (int64_t begin = 0; begin < lines; begin += line)
    for (row = 0; row < fours; row += 4)
      for (int64_t i = begin; i < begin + line; i += 4) {
        const float* corner = from + row * stride + i;
        __m128 one = _mm_loadu_ps(corner), two = _mm_loadu_ps(corner + stride);
        __m128 three = _mm_loadu_ps(corner + 2 * stride), four = _mm_loadu_ps(corner + 3 * stride);
        _MM_TRANSPOSE4_PS(one, two, three, four);
        float* out = to + i * side + row;
        _mm_storeu_ps(out, one), _mm_storeu_ps(out + side, two);
        _mm_storeu_ps(out + 2 * side, three), _mm_storeu_ps(out + 3 * side, four);
      }
  for (row = 0; row < fours; row++)
    for (int64_t i = lines; i < width; i++) to[i * side + row] = from[row * stride + i];
#endif
  for (; row < side; row++)
    for (int64_t i = 0; i < width; i++) to[i * side + row] = row < rows ? from[row * stride + i] : 0;
}

// The first rows of the input [rows, width] as groups [width, rows of the group]; null if none are columns.
std::unique_ptr<float[]> columns_of(const float* input, int64_t all_rows, int64_t width, int64_t stride) {
  const int64_t rows = rows_as_columns(all_rows);
  if (rows == 0) return nullptr;
  std::unique_ptr<float[]> columns(new float[width * lanes_for(rows)]);
  torch::stable::parallel_for(0, (rows + most_of_group - 1) / most_of_group, 1, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * most_of_group, rows);
    for (int64_t row = begin * most_of_group, size; row < last; row += size) {
      size = group_at(row, rows);
      transpose(input + row * stride, stride, std::min(size, rows - row), width, columns.get() + row * width, size);
    }
  });
  return columns;
}

// Products of the same input, in one parallel region. Threads take shares of the outputs in turn: the one that memory or
// other processes delay takes fewer of them.
template <class Any>
void compute(const std::vector<Any>& products) {
  int64_t tiles = 0;
  bool has_small_shares = false;
  for (const Any& product : products) tiles += product.tiles(), has_small_shares = product.has_small_shares();
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t share = has_small_shares ? std::max<int64_t>(1, tiles / (8 * threads)) : (tiles + threads - 1) / threads;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, tiles), 1, [&](int64_t, int64_t) {
    for (int64_t from; (from = next.fetch_add(share, std::memory_order_relaxed)) < tiles;) {
      int64_t to = std::min(from + share, tiles);
      for (const Any& product : products) {
        const int64_t own = product.tiles();
        if (from < own && to > 0) product.compute(std::max<int64_t>(from, 0), std::min(to, own));
        from -= own, to -= own;
      }
    }
  });
}

int64_t outs_of(const std::vector<Tensor>& weights) {
  int64_t outs = 0;
  for (const Tensor& weight : weights) outs += weight.size(0);
  return outs;
}

void check_contiguous(const Tensor& of) {
  const int64_t last = of.dim() - 1;
  STD_TORCH_CHECK(of.size(last) == 1 || of.stride(last) == 1, "the width of inputs and weights has to be contiguous");
}

// scales: none, or those of each weight.
template <class Weight>
Tensor product(const Tensor& input, const std::vector<Tensor>& weights, const std::vector<Tensor>& scales) {
  const int64_t axes = input.dim(), width = input.size(axes - 1), rows = width ? input.numel() / width : 0;
  const int64_t stride = axes == 2 ? input.stride(0) : width, all = outs_of(weights);
  check_contiguous(input);
  STD_TORCH_CHECK(axes == 2 || input.is_contiguous(), "an input of more axes than two has to be contiguous");
  for (const Tensor& weight : weights) {
    check_contiguous(weight);
    STD_TORCH_CHECK(weight.size(1) == width, "the inputs are ", width, " wide, and the weights ", weight.size(1));
  }
  const auto sizes_in = input.sizes();
  std::vector<int64_t> sizes(sizes_in.begin(), sizes_in.end());
  sizes.back() = all;
  Tensor out = torch::stable::new_empty(input, sizes);
  for (int64_t row = 0; row < rows; row += most_at_once) {
    const int64_t count = std::min(most_at_once, rows - row);
    const float* from = static_cast<const float*>(input.data_ptr()) + row * stride;
    float* to = static_cast<float*>(out.data_ptr()) + row * all;
    std::unique_ptr<float[]> columns;
    if (sizeof(Weight) == sizeof(float)) columns = columns_of(from, count, width, stride);
    std::vector<Product<Weight>> products;
    for (size_t i = 0; i < weights.size(); i++) {
      const Tensor& weight = weights[i];
      products.push_back({
        from, static_cast<const Weight*>(weight.data_ptr()),
        scales.empty() ? nullptr : static_cast<const float*>(scales[i].data_ptr()), to, count, weight.size(0), width,
        stride, weight.stride(0), all, columns.get()});
      to += weight.size(0);
    }
    compute(products);
  }
  return out;
}

// Products with codes of 4 bits, in torch's order: for each block of outputs and each input a byte per two outputs, one
// of the first half of the block and one of the second. weight = (code - 8) * scale + offset.
struct FourBits {
  const float* input;  // [rows, width]
  const uint8_t* packed;
  const uint16_t* scales;  // bfloat16 [width / group, outs, 2]: scale and offset
  float* out;  // [rows, outs]
  int64_t rows, outs, width, group, out_stride;
  int64_t half_block;  // in chunks of `lanes` bytes

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
    float total = sum(sums);
    for (; i < count; i++) total += from[i];
    return total;
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

  int64_t tiles() const { return outs / (2 * half_block * lanes); }

  bool has_small_shares() const { return false; }

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

Tensor linears(Tensor input, std::vector<Tensor> weights) { return product<float>(input, weights, {}); }

Tensor int8_linears(Tensor input, std::vector<Tensor> codes, std::vector<Tensor> scales) {
  return product<int8_t>(input, codes, scales);
}

Tensor int4_linears(Tensor input, std::vector<Tensor> packed, std::vector<Tensor> scales, int64_t outs_of_block) {
  const int64_t rows = input.size(0), width = input.size(1), all = outs_of(packed);
  check_contiguous(input);
  STD_TORCH_CHECK(rows == 1 || input.stride(0) == width, "the rows of the input have to follow each other");
  Tensor out = torch::stable::new_empty(input, {rows, all});
  float* to = static_cast<float*>(out.data_ptr());
  for (const Tensor& one : scales)
    STD_TORCH_CHECK(width % one.size(0) == 0 && width / one.size(0) % 2 == 0, "groups have an even number of inputs");
  std::vector<FourBits> products;
  for (size_t i = 0; i < packed.size(); i++) {
    products.push_back({
      static_cast<const float*>(input.data_ptr()), static_cast<const uint8_t*>(packed[i].data_ptr()),
      static_cast<const uint16_t*>(scales[i].data_ptr()), to, rows, packed[i].size(0), width,
      width / scales[i].size(0), all, outs_of_block / lanes / 2});
    to += packed[i].size(0);
  }
  compute(products);
  return out;
}

}  // namespace

// Products of one input float32 [..., width] with several weights -> their outputs side by side, float32 [..., all]. With
// codes of 4 bits the input is [rows, width].
// weights: float32 or codes int8 [outs, width], all with a contiguous width; scales: float32 [outs]. packed, scales of 4
// bits: see `FourBits`.
STABLE_TORCH_LIBRARY(kvengine, library) {
  library.def("linears(Tensor input, Tensor[] weights) -> Tensor");
  library.def("int8_linears(Tensor input, Tensor[] codes, Tensor[] scales) -> Tensor");
  library.def("int4_linears(Tensor input, Tensor[] packed, Tensor[] scales, int outs_of_block) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("linears", TORCH_BOX(&linears));
  library.impl("int8_linears", TORCH_BOX(&int8_linears));
  library.impl("int4_linears", TORCH_BOX(&int4_linears));
}
