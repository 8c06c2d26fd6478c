// Attention over quantized keys and values. Codes are unpacked for a few slots at a time, into memory that stays in the
// L1 cache. If at least 16 neighbouring channels share a scale, products are computed in integers, with queries and
// weights rounded to 16 bits.
//
// A segment is codes [rows, heads, slots, bytes]. Byte i of a slot has the channels i, i + bytes, ..., low bits first.
// scale, offset: [rows, heads, slots, groups] for groups of neighbouring channels (block = 0), or
// [rows, heads, blocks, width] for groups of `block` slots; the last block may be cut off. Or a segment is in full,
// [rows, heads, slots, width]; then bits is 16 or 32. Scales, offsets and what is in full are float32 or of 16 bits,
// queries and results float32. The innermost dimension of all tensors is contiguous, and the width is a multiple of 8.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in seconds
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/softmax.h"
#include "elements.h"
#include "handles.h"
#include "vectors.h"

namespace {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

struct Segment {
  Tensor codes;
  Optional scale, offset;
  int64_t bits, block;
};

inline const uint8_t* bytes_of(const Tensor& of) { return static_cast<const uint8_t*>(of.const_data_ptr()); }
inline const float* floats_of(const Tensor& of) {
  STD_TORCH_CHECK(Borrowed(of).is_float(), "queries, weights and masks have to be float32");
  return static_cast<const float*>(of.const_data_ptr());
}
inline float* floats_in(Tensor& of) { return static_cast<float*>(of.mutable_data_ptr()); }

constexpr int64_t shorts = 16, most_width = 512;
constexpr int64_t few = 32;  // slots that are unpacked at a time
constexpr int64_t most_summed = 256;  // products of 16 and 8 bits whose sum fits into 32 bits

typedef int32_t Ints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(2 * shorts)));

// The totals of four vectors, to four consecutive integers.
inline void totals(Ints a, Ints b, Ints c, Ints d, int32_t* to) {
#ifdef __AVX2__
  const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32((__m256i)a, (__m256i)b),
                                           _mm256_hadd_epi32((__m256i)c, (__m256i)d));
  store(_mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)), to);
#else
  std::fill(to, to + 4, 0);
  for (int64_t i = 0; i < 8; i++) to[0] += a[i], to[1] += b[i], to[2] += c[i], to[3] += d[i];
#endif
}

// The slots of a segment, or of one head of it. Strides are in bytes. groups: 0 for scales per channel. type: of scales
// and offsets, or of slots in full.
struct Slots {
  const uint8_t *codes, *scales = nullptr, *offsets = nullptr;  // nullptr: none
  Type type;
  int64_t codes_row, codes_head, codes_stride, scale_row = 0, scale_head = 0, scale_stride = 0;
  int64_t bytes, width, groups = 0, block, bits;

  Slots(const Segment& segment, int64_t width) : width(width) {
    const Tensor& stored = segment.codes;
    const Optional &scale = segment.scale, &offset = segment.offset;
    const int64_t item = stored.element_size();
    codes = bytes_of(stored), bytes = stored.size(3) * item, type = type_of(scale ? *scale : stored);
    STD_TORCH_CHECK(type != Type::none, other_types);
    bits = segment.bits, block = segment.block;
    codes_row = stored.stride(0) * item, codes_head = stored.stride(1) * item, codes_stride = stored.stride(2) * item;
    const auto contiguous = [](const Tensor& of) { return of.size(3) == 1 || of.stride(3) == 1; };
    STD_TORCH_CHECK(contiguous(stored) && (!scale || contiguous(*scale)), "a slot's elements have to be contiguous");
    if (!scale) return;
    const int64_t of_scale = scale->element_size();
    scales = bytes_of(*scale), groups = block ? 0 : scale->size(3);
    scale_row = scale->stride(0) * of_scale, scale_head = scale->stride(1) * of_scale;
    scale_stride = scale->stride(2) * of_scale;
    if (!offset) return;
    STD_TORCH_CHECK(type_of(*offset) == type, "scale and offset need the same data type");
    for (int64_t axis = 0; axis < 4; axis++)
      STD_TORCH_CHECK(offset->stride(axis) == scale->stride(axis), "scale and offset need the same strides");
    offsets = bytes_of(*offset);
  }

  bool are_in_full() const { return bits >= 16; }

  Slots of(int64_t row, int64_t head) const {
    Slots found = *this;
    found.codes += row * codes_row + head * codes_head;
    if (scales) found.scales += row * scale_row + head * scale_head;
    if (offsets) found.offsets += row * scale_row + head * scale_head;
    return found;
  }
};

// Some slots, unpacked: as floats with the given stride; or, if `as_integers`, as integers that are not scaled yet:
// keys [slots, width], values [slots / 2, width, 2], interleaved in pairs of slots. scales, offsets: [groups, few].
struct Unpacked {
  Slots of;
  int64_t count;
  bool as_integers;
  const float* floats;
  int64_t stride;
  const int16_t* integers;
  const float *scales, *offsets;
};

struct Memory {
  alignas(64) char stored[few * most_width * sizeof(float)];
  float scales[most_width / shorts * few], offsets[most_width / shorts * few];
};

inline Ints widened(const uint8_t* from) {
#ifdef __AVX2__  // GCC 12 takes thirty instructions for the loop below
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Ints found;
  for (int64_t i = 0; i < 8; i++) found[i] = from[i];
  return found;
#endif
}

inline Shorts widened_to_shorts(const uint8_t* from) {
#ifdef __AVX2__
  return (Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Shorts found;
  for (int64_t i = 0; i < shorts; i++) found[i] = from[i];
  return found;
#endif
}

// Unpacks slots of codes, `stride` bytes apart, to floats [slots, width].
template <int bits>
void unpack(const uint8_t* codes, int64_t stride, int64_t count, int64_t bytes, float* floats) {
  for (; count > 0; count--, codes += stride, floats += bytes * (8 / bits)) {
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
      const Ints some = widened(codes + i);
      for (int plane = 0; plane < 8 / bits; plane++)
        store(__builtin_convertvector(some >> (bits * plane) & ((1 << bits) - 1), Eight), floats + plane * bytes + i);
    }
    for (; i < bytes; i++)
      for (int plane = 0; plane < 8 / bits; plane++)
        floats[plane * bytes + i] = (float)((codes[i] >> (bits * plane)) & ((1 << bits) - 1));
  }
}

// The same to integers [slots, width].
template <int bits>
void unpack_keys(const uint8_t* codes, int64_t stride, int64_t count, int64_t bytes, int16_t* integers) {
  for (; count > 0; count--, codes += stride, integers += bytes * (8 / bits)) {
    int64_t i = 0;
    for (; i + shorts <= bytes; i += shorts) {
      const Shorts some = widened_to_shorts(codes + i);
      for (int plane = 0; plane < 8 / bits; plane++)
        store(some >> int16_t(bits * plane) & int16_t((1 << bits) - 1), integers + plane * bytes + i);
    }
    for (; i < bytes; i++)
      for (int plane = 0; plane < 8 / bits; plane++)
        integers[plane * bytes + i] = (codes[i] >> (bits * plane)) & ((1 << bits) - 1);
  }
}

template <int bits>
void unpack_values(const uint8_t* codes, int64_t stride, int64_t count, int64_t bytes, int16_t* integers) {
  for (; count > 0; count -= 2, codes += 2 * stride, integers += 2 * bytes * (8 / bits)) {
    const uint8_t* next = codes + (count > 1 ? stride : 0);  // the last slot of an odd number is its own partner
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
      const Ints both = widened(codes + i) | widened(next + i) << 16;
      for (int plane = 0; plane < 8 / bits; plane++)
        store(both >> (bits * plane) & (((1 << bits) - 1) * 0x10001), integers + 2 * (plane * bytes + i));
    }
    for (; i < bytes; i++)
      for (int plane = 0; plane < 8 / bits; plane++) {
        integers[2 * (plane * bytes + i)] = (codes[i] >> (bits * plane)) & ((1 << bits) - 1);
        integers[2 * (plane * bytes + i) + 1] = (next[i] >> (bits * plane)) & ((1 << bits) - 1);
      }
  }
}

#define OF_BITS(unpack, bits) (bits == 1 ? unpack<1> : bits == 2 ? unpack<2> : bits == 4 ? unpack<4> : unpack<8>)

// Elements as floats: where they are, or widened in `memory`.
inline const float* as_floats(Type type, const uint8_t* from, int64_t count, float* memory) {
  if (type == Type::float32) return reinterpret_cast<const float*>(from);
  with_element(type, [&](auto element) { widen(reinterpret_cast<const decltype(element)*>(from), count, memory); });
  return memory;
}

void scale(const Slots& of, int64_t begin, int64_t end, Memory& memory) {
  float* floats = reinterpret_cast<float*>(memory.stored);
  const int64_t each = of.block ? of.block : 1, scales = of.block ? of.width : of.groups;  // slots and scales
  const float *scale = nullptr, *offset = nullptr;
  for (int64_t i = begin; i < end; i++, floats += of.width) {
    if (i == begin || i % each == 0) {
      const int64_t at = i / each * of.scale_stride;
      scale = as_floats(of.type, of.scales + at, scales, memory.scales);
      if (of.offsets) offset = as_floats(of.type, of.offsets + at, scales, memory.offsets);
    }
    if (of.block)
      for (int64_t c = 0; c < of.width; c++) floats[c] = floats[c] * scale[c] + (offset ? offset[c] : 0);
    else
      for (int64_t g = 0, group = of.width / of.groups; g < of.groups; g++)
        for (int64_t c = g * group; c < (g + 1) * group; c++)
          floats[c] = floats[c] * scale[g] + (offset ? offset[g] : 0);
  }
}

// Scales or offsets as [groups, few], with 0 behind the last slot.
void gather(const uint8_t* from, const Slots& slots, int64_t begin, int64_t end, float* found) {
  std::fill(found, found + slots.groups * few, 0.0f);
  if (!from) return;
  with_element(slots.type, [&](auto element) {
    for (int64_t i = 0; begin + i < end; i++) {
      const auto* of_slot = reinterpret_cast<const decltype(element)*>(from + (begin + i) * slots.scale_stride);
      for (int64_t g = 0; g < slots.groups; g++) found[g * few + i] = as_float(of_slot[g]);
    }
  });
}

enum class Of { keys, values };

Unpacked read(Of kind, const Slots& slots, int64_t begin, int64_t end, Memory& memory) {
  const int64_t bits = slots.bits, stride = slots.codes_stride, count = end - begin;
  const uint8_t* codes = slots.codes + begin * stride;
  // Prefetch the next slots, whose stride is too large for the hardware prefetcher.
  for (int64_t i = end; i < end + count; i++)
    for (int64_t line = 0; line < slots.bytes; line += 64) __builtin_prefetch(slots.codes + i * stride + line);
  Unpacked found{slots, count, false, reinterpret_cast<const float*>(codes), stride / 4, nullptr, nullptr, nullptr};
  float* floats = reinterpret_cast<float*>(memory.stored);
  if (slots.are_in_full()) {
    if (slots.type == Type::float32) return found;
    for (int64_t i = 0; i < count; i++) as_floats(slots.type, codes + i * stride, slots.width, floats + i * slots.width);
    found.floats = floats, found.stride = slots.width;
    return found;
  }
  found.as_integers = slots.groups && slots.width / slots.groups % shorts == 0;
  if (found.as_integers) {
    int16_t* integers = reinterpret_cast<int16_t*>(memory.stored);
    const auto with = kind == Of::keys ? OF_BITS(unpack_keys, bits) : OF_BITS(unpack_values, bits);
    with(codes, stride, count, slots.bytes, integers);
    gather(slots.scales, slots, begin, end, memory.scales);
    gather(slots.offsets, slots, begin, end, memory.offsets);
    found.integers = integers, found.scales = memory.scales, found.offsets = memory.offsets;
  } else {
    OF_BITS(unpack, bits)(codes, stride, count, slots.bytes, floats);
    scale(slots, begin, end, memory);
    found.floats = floats, found.stride = slots.width;
  }
  return found;
}

// Products, added in neighbouring pairs.
inline Ints products(Shorts a, Shorts b) {
#ifdef __AVX2__
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  Ints found;
  for (int64_t i = 0; i < 8; i++) found[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return found;
#endif
}

// Rounds floats to 16-bit integers; returns the unit, NaN if an element is not finite. count: a multiple of 8.
float rounded(const float* floats, int64_t count, int16_t* found) {
  typedef int16_t Halves __attribute__((vector_size(16)));
  Eight most = {}, zero = {};
  for (int64_t i = 0; i < count; i += 8) {
    const Eight some = load<Eight>(floats + i), size = some < 0 ? -some : some;
    most = size > most ? size : most;
    zero += some * 0.0f;
  }
  float largest = 0;
  for (int64_t i = 0; i < 8; i++) largest = std::max(largest, most[i]);
  const float steps = largest > 0 ? 32767 / largest : 0;
  const Eight large = Eight{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < count; i += 8)
    store(__builtin_convertvector((Ints)(load<Eight>(floats + i) * steps + large) - (Ints)large, Halves), found + i);
  return largest / 32767 + total(zero);
}

// Corrects the rounding of queries and weights, as if all codes had the middle value: codes are close to it on average.
inline float middle(int64_t bits) { return ((1 << bits) - 1) / 2.0f; }

// Queries [..., width], exact and rounded to integers.
struct Queries {
  const float* exact;
  int64_t width;
  std::vector<int16_t> integers;
  std::vector<float> unit;

  explicit Queries(const Tensor& given)
      : exact(floats_of(given)), width(given.size(given.dim() - 1)), integers(given.numel()),
        unit(given.numel() / width) {
    for (int64_t i = 0; i < (int64_t)unit.size(); i++)
      unit[i] = rounded(exact + i * width, width, integers.data() + i * width);
  }
};

// Products [slots] of a query with keys.
void multiply_floats(const float* query, const Unpacked& keys, float* out) {
  const int64_t width = keys.of.width;
  int64_t slot = 0;
  for (; slot + 4 <= keys.count; slot += 4) {  // four at once, to load the query less often
    const float* key = keys.floats + slot * keys.stride;
    Eight sums[4] = {};
    for (int64_t i = 0; i < width; i += 8) {
      const Eight q = load<Eight>(query + i);
      for (int64_t one = 0; one < 4; one++) sums[one] += q * load<Eight>(key + one * keys.stride + i);
    }
    store(totals(sums), out + slot);
  }
  for (; slot < keys.count; slot++) {
    Eight sum = {};
    const float* key = keys.floats + slot * keys.stride;
    for (int64_t i = 0; i < width; i += 8) sum += load<Eight>(query + i) * load<Eight>(key + i);
    out[slot] = total(sum);
  }
}

void multiply_integers(const Queries& queries, int64_t number, const Unpacked& keys, float* out) {
  const int64_t width = keys.of.width, group = width / keys.of.groups;
  const int16_t* query = queries.integers.data() + number * width;
  std::fill(out, out + keys.count, 0.0f);
  for (int64_t g = 0; g < keys.of.groups; g++) {
    const int64_t begin = g * group, end = begin + group;
    float of_query = 0;
    int32_t sum_of_integers = 0;
    for (int64_t i = begin; i < end; i++) of_query += queries.exact[number * width + i], sum_of_integers += query[i];
    const float unit = queries.unit[number], lost = middle(keys.of.bits) * (of_query - unit * (float)sum_of_integers);
    float found[few] = {};
    for (int64_t first = begin; first < end; first += most_summed) {
      const int64_t last = std::min(first + most_summed, end);
      for (int64_t slot = 0; slot < keys.count; slot += 4) {  // slots behind the last have old data, and are not read
        const int16_t* key = keys.integers + slot * width;
        Ints a = {}, b = {}, c = {}, d = {};
        for (int64_t i = first; i < last; i += shorts) {
          const Shorts q = load<Shorts>(query + i);
          a += products(q, load<Shorts>(key + i));
          b += products(q, load<Shorts>(key + width + i));
          c += products(q, load<Shorts>(key + 2 * width + i));
          d += products(q, load<Shorts>(key + 3 * width + i));
        }
        int32_t sums[4];
        totals(a, b, c, d, sums);
        for (int64_t i = 0; i < 4; i++) found[slot + i] += (float)sums[i];
      }
    }
    const float *scales = keys.scales + g * few, *offsets = keys.offsets + g * few;
    for (int64_t i = 0; i < keys.count; i++) out[i] += (found[i] * unit + lost) * scales[i] + of_query * offsets[i];
  }
}

void multiply(const Queries& queries, int64_t number, const Unpacked& keys, float* out) {
  if (keys.as_integers) return multiply_integers(queries, number, keys, out);
  multiply_floats(queries.exact + number * queries.width, keys, out);
}

template <int vectors>
inline void add_floats(const float* weights, const Unpacked& values, int64_t channel, float* out) {
  Eight sums[vectors];
  for (int v = 0; v < vectors; v++) sums[v] = load<Eight>(out + channel + v * 8);
  for (int64_t slot = 0; slot < values.count; slot++) {
    const float* value = values.floats + slot * values.stride + channel;
    for (int v = 0; v < vectors; v++) sums[v] += weights[slot] * load<Eight>(value + v * 8);
  }
  __builtin_memcpy(out + channel, sums, sizeof(sums));
}

template <int vectors>
inline void add_integers(const int16_t* weights, float unit, float constant, const Unpacked& values, int64_t channel,
                         float* out) {
  Ints sums[vectors] = {};
  const int16_t* value = values.integers + 2 * channel;
  for (int64_t slot = 0; slot < values.count; slot += 2, value += 2 * values.of.width) {
    int32_t two;
    __builtin_memcpy(&two, weights + slot, sizeof(two));
    const Shorts weight = (Shorts)(Ints{} + two);
    for (int v = 0; v < vectors; v++) sums[v] += products(weight, load<Shorts>(value + v * shorts));
  }
  for (int v = 0; v < vectors; v++) {
    float* to = out + channel + v * 8;
    store(load<Eight>(to) + (__builtin_convertvector(sums[v], Eight) * unit + constant), to);
  }
}

// Adds the sum of values, weighted by weights [few] that are 0 behind the last slot, to out [width].
void add(const float* weights, const Unpacked& values, float* out) {
  const int64_t width = values.of.width;
  int64_t channel = 0;
  if (!values.as_integers) {
    for (; channel + 8 * 8 <= width; channel += 8 * 8) add_floats<8>(weights, values, channel, out);
    for (; channel < width; channel += 8) add_floats<1>(weights, values, channel, out);
    return;
  }
  for (int64_t g = 0, group = width / values.of.groups; g < values.of.groups; g++) {
    const float *scales = values.scales + g * few, *offsets = values.offsets + g * few;
    float scaled[few], constant = 0, of_weights = 0;
    int16_t integers[few];
    int32_t sum_of_integers = 0;
    for (int64_t i = 0; i < few; i++) {
      scaled[i] = weights[i] * scales[i];
      constant += weights[i] * offsets[i];
    }
    const float unit = rounded(scaled, few, integers);
    for (int64_t i = 0; i < few; i++) of_weights += scaled[i], sum_of_integers += integers[i];
    constant += middle(values.of.bits) * (of_weights - unit * (float)sum_of_integers);
    const int64_t end = (g + 1) * group;
    for (; channel + 8 * 8 <= end; channel += 8 * 8)
      add_integers<8>(integers, unit, constant, values, channel, out);
    for (; channel < end; channel += 8) add_integers<1>(integers, unit, constant, values, channel, out);
  }
}

struct alignas(64) OwnSoftmax : Softmax {};  // one cache line each: no false sharing between threads

// A part of a segment, of at most `few` slots.
struct Part {
  int64_t segment, begin, end, slot;  // slot: counted over all segments
};

std::vector<Part> parts_of(const std::vector<Segment>& segments) {
  std::vector<Part> parts;
  int64_t slot = 0;
  for (int64_t segment = 0; segment < (int64_t)segments.size(); segment++) {
    const int64_t count = segments[segment].codes.size(2);
    for (int64_t begin = 0; begin < count; begin += few)
      parts.push_back({segment, begin, std::min(begin + few, count), slot + begin});
    slot += count;
  }
  return parts;
}

// Calls `work(row, share, part)` for all parts of every row, in parallel; one thread does all parts of a share.
template <typename Work>
void shared(int64_t rows, int64_t shares, const std::vector<Part>& parts, const Work& work) {
  const int64_t count = parts.size();
  torch::stable::parallel_for(0, rows * shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t job = first; job < last; job++) {
      const int64_t row = job / shares, share = job % shares;
      for (int64_t number = share * count / shares; number < (share + 1) * count / shares; number++)
        work(row, share, parts[number]);
    }
  });
}

int64_t shares_of(const std::vector<Part>& parts) {
  return std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), parts.size()));
}

// queries [rows, heads, tokens, width] -> [rows, heads, tokens, slots]
Tensor scores(Tensor given, Tensor codes, Optional scale, Optional offset, int64_t bits, int64_t block) {
  const Tensor queries = torch::stable::contiguous(given);
  const Segment keys{codes, scale, offset, bits, block};
  const int64_t rows = queries.size(0), heads = queries.size(1), tokens = queries.size(2), width = queries.size(3);
  const int64_t slots = codes.size(2);
  Tensor out = torch::stable::new_empty(queries, {rows, heads, tokens, slots});
  const Queries asked(queries);
  float* found = floats_in(out);
  const auto parts = parts_of({keys});
  const Slots stored(keys, width);
  shared(rows, shares_of(parts), parts, [&](int64_t row, int64_t, const Part& part) {
    Memory memory;
    for (int64_t head = 0; head < heads; head++) {
      const Unpacked some = read(Of::keys, stored.of(row, head), part.begin, part.end, memory);
      for (int64_t at = (row * heads + head) * tokens, end = at + tokens; at < end; at++)
        multiply(asked, at, some, found + at * slots + part.begin);
    }
  });
  return out;
}

// weights [rows, heads, tokens, slots] -> [rows, heads, tokens, width]
Tensor mixed(Tensor given, Tensor codes, Optional scale, Optional offset, int64_t bits, int64_t block, int64_t width) {
  const Tensor weights = torch::stable::contiguous(given);
  const Segment values{codes, scale, offset, bits, block};
  const int64_t rows = weights.size(0), heads = weights.size(1), tokens = weights.size(2), slots = weights.size(3);
  const auto parts = parts_of({values});
  const int64_t shares = shares_of(parts);
  const Slots stored(values, width);
  Tensor sums = torch::stable::new_zeros(weights, {rows, shares, heads, tokens, width});
  const float* by = floats_of(weights);
  float* to = floats_in(sums);
  shared(rows, shares, parts, [&](int64_t row, int64_t share, const Part& part) {
    Memory memory;
    float of_part[few] = {};
    for (int64_t head = 0; head < heads; head++) {
      const Unpacked some = read(Of::values, stored.of(row, head), part.begin, part.end, memory);
      for (int64_t token = 0; token < tokens; token++) {
        const float* weight = by + ((row * heads + head) * tokens + token) * slots;
        std::copy(weight + part.begin, weight + part.end, of_part);
        add(of_part, some, to + (((row * shares + share) * heads + head) * tokens + token) * width);
      }
    }
  });
  if (shares == 1) return torch::stable::squeeze(sums, 1);
  const int64_t over[] = {1};
  return torch::stable::sum(sums, over);
}

// Attention: scaled queries [forms, rows, KV heads, queries, width] -> [rows, KV heads, queries, forms * values' width].
// Each segment is multiplied with the queries in its form, and the sums of its values are apart from those of others.
// mask: [rows, KV heads, heads per KV head, tokens, slots], added to the scores.
// tensors: of the segments of the keys, then of those of the values: codes, and scale and offset if there are.
// layout: for each of these segments bits, block, form and the number of its tensors.
Tensor attention(Tensor given, std::vector<Tensor> tensors, std::vector<int64_t> layout, Optional mask,
                 int64_t out_width) {
  const Tensor queries = torch::stable::contiguous(given);
  std::vector<Segment> keys, values;
  std::vector<int64_t> key_forms, value_forms;
  for (int64_t i = 0, at = 0, segments = layout.size() / 4; i < segments; i++) {
    const int64_t *of = layout.data() + 4 * i, count = of[3];
    (i < segments / 2 ? key_forms : value_forms).push_back(of[2]);
    (i < segments / 2 ? keys : values)
        .push_back({tensors[at], count > 1 ? Optional(tensors[at + 1]) : std::nullopt,
                    count > 2 ? Optional(tensors[at + 2]) : std::nullopt, of[0], of[1]});
    at += count;
  }
  const int64_t rows = queries.size(1), heads = queries.size(2), tokens = queries.size(3), width = queries.size(4);
  const auto parts = parts_of(keys);
  const int64_t shares = shares_of(parts), of_row = heads * tokens, all_width = queries.size(0) * out_width;
  Tensor out = torch::stable::new_empty(queries, {rows, heads, tokens, all_width});
  std::vector<float> sums(rows * shares * of_row * all_width);
  std::vector<OwnSoftmax> softmax(rows * shares * of_row);
  const Queries asked(queries);
  std::vector<Slots> stored_keys, stored_values;
  for (const Segment& segment : keys) stored_keys.emplace_back(segment, width);
  for (const Segment& segment : values) stored_values.emplace_back(segment, out_width);
  // Calls across the interface cost more than the sums of a short part.
  const float* added = mask ? floats_of(*mask) : nullptr;
  int64_t each = 1, mask_strides[4] = {};
  if (mask) {
    each = mask->size(3);
    for (int64_t axis = 0; axis < 4; axis++) mask_strides[axis] = mask->stride(axis);
  }
  shared(rows, shares, parts, [&](int64_t row, int64_t share, const Part& part) {
    Memory memory;
    std::vector<float> scores(tokens * few, unseen);
    for (int64_t head = 0; head < heads; head++) {
      const int64_t from = ((key_forms[part.segment] * rows + row) * heads + head) * tokens;
      const int64_t to = (row * shares + share) * of_row + head * tokens;
      const Unpacked some_keys = read(Of::keys, stored_keys[part.segment].of(row, head), part.begin, part.end, memory);
      for (int64_t token = 0; token < tokens; token++) {
        float* found = scores.data() + token * few;
        multiply(asked, from + token, some_keys, found);
        if (added) {
          const float* of_token = added + row * mask_strides[0] + head * mask_strides[1] +
                                  token / each * mask_strides[2] + token % each * mask_strides[3] + part.slot;
          for (int64_t i = 0; i < some_keys.count; i++) found[i] += of_token[i];
        }
        std::fill(found + some_keys.count, found + few, unseen);
        weigh(found, few, softmax[to + token], sums.data() + (to + token) * all_width, all_width);
      }
      const Slots head_values = stored_values[part.segment].of(row, head);
      const Unpacked some_values = read(Of::values, head_values, part.begin, part.end, memory);
      float* of_form = sums.data() + value_forms[part.segment] * out_width;
      for (int64_t token = 0; token < tokens; token++)
        add(scores.data() + token * few, some_values, of_form + (to + token) * all_width);
    }
  });
  float* result = floats_in(out);
  for (int64_t at = 0; at < rows * of_row; at++) {
    const int64_t first = at / of_row * shares * of_row + at % of_row, end = first + shares * of_row;
    Softmax all;
    float* target = result + at * all_width;
    std::fill(target, target + all_width, 0.0f);
    for (int64_t from = first; from < end; from += of_row)
      join(all, target, softmax[from], &sums[from * all_width], all_width);
    if (all.total != 0)  // else the query sees no slot
      for (int64_t i = 0; i < all_width; i++) target[i] /= all.total;
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvengine, library) {
  library.def("scores(Tensor queries, Tensor codes, Tensor? scale, Tensor? offset, int bits, int block) -> Tensor");
  library.def(
      "mixed(Tensor weights, Tensor codes, Tensor? scale, Tensor? offset, int bits, int block, int width) -> Tensor");
  library.def("attention(Tensor queries, Tensor[] tensors, int[] layout, Tensor? mask, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("scores", TORCH_BOX(&scores));
  library.impl("mixed", TORCH_BOX(&mixed));
  library.impl("attention", TORCH_BOX(&attention));
}
