// Attention over columns of keys and values that are written down as codes. They are unpacked a few at a time, into
// memory that stays in the processor's nearest cache.
//
// Columns are codes [rows, heads, columns, bytes], of which byte i of a column holds the channels i, i + bytes, ...,
// lowest bits first, with scale, offset [rows, heads, columns, groups] of neighbouring channels, or
// [rows, heads, blocks, width] of `block` columns; then block > 0. The last block may be cut off. Or they are numbers
// [rows, heads, columns, width] as they are; then bits is 32. Everything but the codes is float32, the innermost
// dimension of everything is contiguous, the width a multiple of 8.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>  // <torch/extension.h> takes half a minute more

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace {

using Optional = std::optional<at::Tensor>;
using Piece = std::tuple<at::Tensor, Optional, Optional, int64_t, int64_t>;  // codes, scale, offset, bits, block

constexpr int64_t lanes = 8, most_width = 512;
constexpr int64_t few = 32;  // columns that are unpacked at a time
constexpr float none = -std::numeric_limits<float>::infinity();

typedef int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef float Lanes __attribute__((vector_size(4 * lanes)));

inline Lanes load(const float* from) {
  Lanes found;
  __builtin_memcpy(&found, from, sizeof(found));
  return found;
}

inline void store(Lanes from, float* to) { __builtin_memcpy(to, &from, sizeof(from)); }

inline float total(Lanes of) {
  float sum = 0;
  for (int64_t i = 0; i < lanes; i++) sum += of[i];
  return sum;
}

// The columns of one head. codes_stride: in bytes. groups: 0 where channels have scales of their own.
struct Columns {
  const uint8_t* codes;
  const float *scale = nullptr, *offset = nullptr;  // nullptr: none
  int64_t codes_stride, scale_stride = 0;
  int64_t bytes, width, groups = 0, block, bits;

  Columns(const Piece& piece, int64_t width, int64_t row, int64_t head) : width(width) {
    const auto& [held, scales, offsets, of_bits, of_block] = piece;
    const int64_t item = held.element_size(), at = row * held.stride(0) + head * held.stride(1);
    codes = static_cast<const uint8_t*>(held.const_data_ptr()) + at * item;
    codes_stride = held.stride(2) * item, bytes = held.size(3), bits = of_bits, block = of_block;
    if (!scales) return;
    const int64_t of_head = row * scales->stride(0) + head * scales->stride(1);
    scale = scales->const_data_ptr<float>() + of_head, scale_stride = scales->stride(2);
    groups = block ? 0 : scales->size(3);
    if (!offsets) return;
    TORCH_CHECK(offsets->strides() == scales->strides(), "scale and offset lie in memory alike");
    offset = offsets->const_data_ptr<float>() + of_head;
  }
};

// Some columns as numbers, the `stride` from one to the next; each still to be multiplied with its scale and added
// to its offset, if `scaled`.
struct Numbers {
  const float* at;
  int64_t stride, count;
  bool scaled;
  float scale[few], offset[few];
  alignas(64) float unpacked[few * most_width];
};

inline Ints widened(const uint8_t* from) {
#ifdef __AVX2__  // GCC 12 takes thirty instructions for the loop below
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Ints found;
  for (int64_t i = 0; i < lanes; i++) found[i] = from[i];
  return found;
#endif
}

// Columns of codes, one `stride` from the next, as numbers [columns, width].
template <int bits>
void unpack(const uint8_t* codes, int64_t stride, int64_t count, int64_t bytes, float* numbers) {
  for (; count > 0; count--, codes += stride, numbers += bytes * (8 / bits)) {
    int64_t i = 0;
    for (; i + lanes <= bytes; i += lanes) {
      const Ints some = widened(codes + i);
      for (int plane = 0; plane < 8 / bits; plane++)
        store(__builtin_convertvector(some >> (bits * plane) & ((1 << bits) - 1), Lanes), numbers + plane * bytes + i);
    }
    for (; i < bytes; i++)
      for (int plane = 0; plane < 8 / bits; plane++)
        numbers[plane * bytes + i] = (float)((codes[i] >> (bits * plane)) & ((1 << bits) - 1));
  }
}

void read(const Columns& columns, int64_t begin, int64_t end, Numbers& found) {
  const int64_t width = columns.width, bits = columns.bits, count = end - begin;
  const uint8_t* codes = columns.codes + begin * columns.codes_stride;
  found.at = found.unpacked, found.stride = width, found.count = count, found.scaled = columns.groups == 1;
  if (bits == 32) {
    found.at = reinterpret_cast<const float*>(codes), found.stride = columns.codes_stride / 4;
    return;
  }
  const auto with = bits == 1 ? unpack<1> : bits == 2 ? unpack<2> : bits == 4 ? unpack<4> : unpack<8>;
  with(codes, columns.codes_stride, count, columns.bytes, found.unpacked);
  if (found.scaled) {
    const float* scale = columns.scale + begin * columns.scale_stride;
    for (int64_t i = 0; i < count; i++) found.scale[i] = scale[i * columns.scale_stride];
    const float* offset = columns.offset ? columns.offset + begin * columns.scale_stride : nullptr;
    for (int64_t i = 0; i < count; i++) found.offset[i] = offset ? offset[i * columns.scale_stride] : 0;
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = (columns.block ? (begin + i) / columns.block : begin + i) * columns.scale_stride;
    const float *scale = columns.scale + at, *offset = columns.offset ? columns.offset + at : nullptr;
    float* numbers = found.unpacked + i * width;
    if (columns.block)
      for (int64_t c = 0; c < width; c++) numbers[c] = numbers[c] * scale[c] + (offset ? offset[c] : 0);
    else
      for (int64_t g = 0, group = width / columns.groups; g < columns.groups; g++)
        for (int64_t c = g * group; c < (g + 1) * group; c++)
          numbers[c] = numbers[c] * scale[g] + (offset ? offset[g] : 0);
  }
}

// Products [columns] of a query with keys.
void multiply(const float* query, const Numbers& keys, int64_t width, float* out) {
  int64_t column = 0;
  for (; column + 4 <= keys.count; column += 4) {  // at once, to read the query less often
    const float* key = keys.at + column * keys.stride;
    Lanes a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i < width; i += lanes) {
      const Lanes q = load(query + i);
      a += q * load(key + i);
      b += q * load(key + keys.stride + i);
      c += q * load(key + 2 * keys.stride + i);
      d += q * load(key + 3 * keys.stride + i);
    }
    out[column] = total(a), out[column + 1] = total(b), out[column + 2] = total(c), out[column + 3] = total(d);
  }
  for (; column < keys.count; column++) {
    Lanes sum = {};
    for (int64_t i = 0; i < width; i += lanes) sum += load(query + i) * load(keys.at + column * keys.stride + i);
    out[column] = total(sum);
  }
  if (!keys.scaled) return;
  Lanes sum = {};
  for (int64_t i = 0; i < width; i += lanes) sum += load(query + i);
  const float of_query = total(sum);
  for (int64_t i = 0; i < keys.count; i++) out[i] = out[i] * keys.scale[i] + of_query * keys.offset[i];
}

template <int vectors>
inline void add_channels(const float* weights, const Numbers& values, int64_t channel, float constant, float* out) {
  Lanes sums[vectors];
  for (int v = 0; v < vectors; v++) sums[v] = load(out + channel + v * lanes) + constant;
  for (int64_t column = 0; column < values.count; column++) {
    const float* value = values.at + column * values.stride + channel;
    for (int v = 0; v < vectors; v++) sums[v] += weights[column] * load(value + v * lanes);
  }
  __builtin_memcpy(out + channel, sums, sizeof(sums));
}

// Add the sum of values by weights [columns], which are overwritten, to out [width].
void add(float* weights, const Numbers& values, int64_t width, float* out) {
  float constant = 0;
  if (values.scaled)
    for (int64_t i = 0; i < values.count; i++) {
      constant += weights[i] * values.offset[i];
      weights[i] *= values.scale[i];
    }
  int64_t channel = 0;
  for (; channel + 8 * lanes <= width; channel += 8 * lanes) add_channels<8>(weights, values, channel, constant, out);
  for (; channel < width; channel += lanes) add_channels<1>(weights, values, channel, constant, out);
}

// e to the power of x, which is not above 0: to 2e-7 of it, and 0 below -87. With the coefficients of Cephes' expf.
inline Lanes power(Lanes x) {
  const Lanes least = Lanes{} - 87.0f, bounded = x < least ? least : x;  // and NaN stays NaN
  const Ints whole = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Ints);
  const Lanes number = __builtin_convertvector(whole, Lanes);
  const Lanes rest = bounded - number * 0.693359375f + number * 2.12194440e-4f;
  Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return x < least ? Lanes{} : sum * (Lanes)((whole + 127) << 23);
}

// What softmax has seen of the scores of a query: the largest, and the sum of the powers relative to it. Out
// [width] is the sum of the values by them.
struct Seen {
  float most = none, sum = 0;
};

// Scores [few] become weights; what was summed up before is taken down to the largest there is now.
void weigh(float* scores, Seen& seen, float* out, int64_t width) {
  Lanes largest = Lanes{} + seen.most, sum = {};
  for (int64_t i = 0; i < few; i += lanes) {
    const Lanes some = load(scores + i);
    largest = some > largest ? some : largest;
  }
  float most = seen.most;
  for (int64_t i = 0; i < lanes; i++) most = largest[i] > most ? largest[i] : most;
  if (most > seen.most && seen.sum != 0) {
    const float factor = std::exp(seen.most - most);
    seen.sum *= factor;
    for (int64_t i = 0; i < width; i++) out[i] *= factor;
  }
  seen.most = most;
  for (int64_t i = 0; i < few; i += lanes) {
    const Lanes some = power(load(scores + i) - (most == none ? 0 : most));
    store(some, scores + i);
    sum += some;
  }
  seen.sum += total(sum);
}

// Pieces in parts of `few` columns.
struct Part {
  int64_t piece, begin, end, column;  // column: of all pieces
};

std::vector<Part> parts_of(const std::vector<Piece>& pieces) {
  std::vector<Part> parts;
  int64_t column = 0;
  for (int64_t piece = 0; piece < (int64_t)pieces.size(); piece++) {
    const int64_t count = std::get<0>(pieces[piece]).size(2);
    for (int64_t begin = 0; begin < count; begin += few)
      parts.push_back({piece, begin, std::min(begin + few, count), column + begin});
    column += count;
  }
  return parts;
}

// The threads share the parts of every row: calls `work(row, share, part)`, the parts of a share by one thread.
template <typename Work>
void shared(int64_t rows, int64_t shares, const std::vector<Part>& parts, const Work& work) {
  const int64_t count = parts.size();
  at::parallel_for(0, rows * shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t job = first; job < last; job++) {
      const int64_t row = job / shares, share = job % shares;
      for (int64_t number = share * count / shares; number < (share + 1) * count / shares; number++)
        work(row, share, parts[number]);
    }
  });
}

int64_t shares_of(const std::vector<Part>& parts) {
  return std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), parts.size()));
}

}  // namespace

// queries [rows, heads, tokens, width] -> [rows, heads, tokens, columns]
at::Tensor scores(const Piece& keys, const at::Tensor& given) {
  const auto queries = given.contiguous();
  const int64_t rows = queries.size(0), heads = queries.size(1), tokens = queries.size(2), width = queries.size(3);
  const int64_t columns = std::get<0>(keys).size(2);
  auto out = at::empty({rows, heads, tokens, columns}, queries.options());
  const float* query = queries.const_data_ptr<float>();
  float* found = out.data_ptr<float>();
  const auto parts = parts_of({keys});
  shared(rows, shares_of(parts), parts, [&](int64_t row, int64_t, const Part& part) {
    Numbers numbers;
    for (int64_t head = 0; head < heads; head++) {
      read(Columns(keys, width, row, head), part.begin, part.end, numbers);
      for (int64_t at = (row * heads + head) * tokens, end = at + tokens; at < end; at++)
        multiply(query + at * width, numbers, width, found + at * columns + part.begin);
    }
  });
  return out;
}

// weights [rows, heads, tokens, columns] -> [rows, heads, tokens, width]
at::Tensor mixed(const Piece& values, const at::Tensor& given, int64_t width) {
  const auto weights = given.contiguous();
  const int64_t rows = weights.size(0), heads = weights.size(1), tokens = weights.size(2), columns = weights.size(3);
  const auto parts = parts_of({values});
  const int64_t shares = shares_of(parts);
  auto sums = at::zeros({rows, shares, heads, tokens, width}, weights.options());
  shared(rows, shares, parts, [&](int64_t row, int64_t share, const Part& part) {
    Numbers numbers;
    float of_part[few];
    for (int64_t head = 0; head < heads; head++) {
      read(Columns(values, width, row, head), part.begin, part.end, numbers);
      for (int64_t token = 0; token < tokens; token++) {
        const float* weight = weights.const_data_ptr<float>() + ((row * heads + head) * tokens + token) * columns;
        std::copy(weight + part.begin, weight + part.end, of_part);
        add(of_part, numbers, width,
            sums.data_ptr<float>() + (((row * shares + share) * heads + head) * tokens + token) * width);
      }
    }
  });
  return shares == 1 ? sums.squeeze(1) : sums.sum(1);
}

// Of queries [rows, heads, tokens, width] that are scaled already, -> [rows, heads, tokens, values' width]. mask
// [rows, heads, repeats, tokens of each, columns] is added to the scores.
at::Tensor attention(const at::Tensor& given, const std::vector<Piece>& keys, const std::vector<Piece>& values,
                     const Optional& mask, int64_t out_width) {
  const auto queries = given.contiguous();
  const int64_t rows = queries.size(0), heads = queries.size(1), tokens = queries.size(2), width = queries.size(3);
  const auto parts = parts_of(keys);
  const int64_t shares = shares_of(parts), of_row = heads * tokens;
  auto out = at::empty({rows, heads, tokens, out_width}, queries.options());
  std::vector<float> sums(rows * shares * of_row * out_width);
  std::vector<Seen> seen(rows * shares * of_row);
  const float* query = queries.const_data_ptr<float>();
  shared(rows, shares, parts, [&](int64_t row, int64_t share, const Part& part) {
    Numbers numbers;
    std::vector<float> scores(tokens * few, none);
    for (int64_t head = 0; head < heads; head++) {
      const int64_t from = (row * heads + head) * tokens, to = (row * shares + share) * of_row + head * tokens;
      read(Columns(keys[part.piece], width, row, head), part.begin, part.end, numbers);
      for (int64_t token = 0; token < tokens; token++) {
        float* found = scores.data() + token * few;
        multiply(query + (from + token) * width, numbers, width, found);
        if (mask) {
          const int64_t each = mask->size(3);
          const float* added = mask->const_data_ptr<float>() + row * mask->stride(0) + head * mask->stride(1) +
                               token / each * mask->stride(2) + token % each * mask->stride(3) + part.column;
          for (int64_t i = 0; i < numbers.count; i++) found[i] += added[i];
        }
        std::fill(found + numbers.count, found + few, none);
        weigh(found, seen[to + token], sums.data() + (to + token) * out_width, out_width);
      }
      read(Columns(values[part.piece], out_width, row, head), part.begin, part.end, numbers);
      for (int64_t token = 0; token < tokens; token++)
        add(scores.data() + token * few, numbers, out_width, sums.data() + (to + token) * out_width);
    }
  });
  // What the threads have found, taken to the largest score of all.
  for (int64_t at = 0; at < rows * of_row; at++) {
    const int64_t first = at / of_row * shares * of_row + at % of_row, end = first + shares * of_row;
    float most = none, sum = 0, *target = out.data_ptr<float>() + at * out_width;
    for (int64_t from = first; from < end; from += of_row) most = std::max(most, seen[from].most);
    std::fill(target, target + out_width, 0.0f);
    for (int64_t from = first; from < end; from += of_row) {
      const float factor = seen[from].most == most ? 1 : std::exp(seen[from].most - most);
      sum += factor * seen[from].sum;
      for (int64_t i = 0; i < out_width; i++) target[i] += factor * sums[from * out_width + i];
    }
    for (int64_t i = 0; i < out_width; i++) target[i] /= sum;
  }
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("scores", &scores);
  module.def("mixed", &mixed);
  module.def("attention", &attention);
}
