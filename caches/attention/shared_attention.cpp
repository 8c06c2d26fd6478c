// Attention of rows that share the keys and values of their prompt. The queries of such rows are the lanes of vectors,
// so that a key is read once for all of them. float32.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in seconds
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;

#ifdef __AVX512F__
constexpr int64_t lanes = 16;
#else
constexpr int64_t lanes = 8;
#endif
constexpr int at_once = lanes == 16 ? 8 : 6;  // sums of a tile that stay in registers, each of two vectors
constexpr int64_t block = 96;  // slots: their scores stay in the L1 cache
constexpr int64_t most_groups = 4;  // groups of queries that read a block of keys one after another
constexpr float lowest = std::numeric_limits<float>::lowest();

typedef float Lanes __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef float Eight __attribute__((vector_size(32)));  // widths are multiples of 8
typedef int32_t EightInts __attribute__((vector_size(32)));

template <class Vector = Lanes>
inline Vector load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

template <class Vector>
inline void store(Vector from, float* to) {
  std::memcpy(to, &from, sizeof(from));
}

inline float total(Eight of) {
  float sum = 0;
  for (int64_t i = 0; i < 8; i++) sum += of[i];
  return sum;
}

template <class Vector>
inline Vector larger(Vector one, Vector other) {
  return one > other ? one : other;
}

// exp(x) for x <= 0, with a relative error of 2e-7, and 0 below -87. Coefficients: Cephes' expf.
template <class Vector, class Integers>
inline Vector power_of(Vector x) {
  const Vector least = Vector{} - 87.0f, bounded = x < least ? least : x;  // keeps NaN
  const Integers exponent = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Integers);
  const Vector number = __builtin_convertvector(exponent, Vector);
  const Vector rest = bounded - number * 0.693359375f + number * 2.12194440e-4f;
  Vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return x < least ? Vector{} : sum * (Vector)((exponent + 127) << 23);
}

inline Lanes power(Lanes x) { return power_of<Lanes, Ints>(x); }
#ifdef __AVX512F__
inline Eight power(Eight x) { return power_of<Eight, EightInts>(x); }
#endif

// Keys or values [rows, heads, slots, width] of a segment.
struct Slots {
  const float* data;
  int64_t rows, count, of_row, of_head, stride;

  explicit Slots(const Tensor& of)
      : data(static_cast<const float*>(of.const_data_ptr())), rows(of.size(0)), count(of.size(2)),
        of_row(of.stride(0)), of_head(of.stride(1)), stride(of.stride(2)) {
    STD_TORCH_CHECK(of.size(3) == 1 || of.stride(3) == 1, "the elements of a slot have to be contiguous");
  }

  const float* at(int64_t row, int64_t head, int64_t slot) const {
    return data + row * of_row + head * of_head + slot * stride;
  }
};

struct Segment {
  Slots keys, values;
  int64_t begin;  // its first slot, counted over all segments
};

// Softmax so far of one query: the largest score, and the sum of exp(score - largest).
struct Softmax {
  float most = lowest, total = 0;
};

struct Work {
  const float* queries;  // [rows, heads, queries, width]
  const float* mask;  // or null
  int64_t rows, heads, each, width, out_width, prompts;  // each: queries per row and head
  int64_t mask_strides[4];
  std::vector<Segment> common, own;  // of prompts, and of rows
  int64_t shares;  // of the common slots, each with a softmax of its own
  std::vector<float> sums;  // [shares, rows, heads, queries, out_width]
  std::vector<Softmax> softmax;  // [shares, rows, heads, queries]

  int64_t of_prompt() const { return rows / prompts * each; }  // queries per head
  int64_t common_slots() const { return common.empty() ? 0 : common.back().begin + common.back().keys.count; }
  int64_t at(int64_t row, int64_t head, int64_t query) const { return (row * heads + head) * each + query; }
  int64_t of_share(int64_t share) const { return share * rows * heads * each; }

  float added(int64_t row, int64_t head, int64_t query, int64_t slot) const {
    return mask[row * mask_strides[0] + head * mask_strides[1] + query * mask_strides[2] + slot * mask_strides[3]];
  }
};

// to[o, :] (+)= sum over i of a[o, i] * b[i, :], where a row of `b` and `to` is some vectors.
template <int vectors, int outs, bool adds>
inline void tile(const float* a, int64_t a_out, int64_t a_in, const float* b, int64_t count, float* to) {
  constexpr int64_t each = vectors * lanes;
  Lanes sums[outs][vectors] = {};
  if (adds)
    for (int o = 0; o < outs; o++)
      for (int v = 0; v < vectors; v++) sums[o][v] = load(to + o * each + v * lanes);
  for (int64_t i = 0; i < count; i++, a += a_in, b += each) {
    Lanes values[vectors];
    for (int v = 0; v < vectors; v++) values[v] = load(b + v * lanes);
    for (int o = 0; o < outs; o++)
      for (int v = 0; v < vectors; v++) sums[o][v] += values[v] * a[o * a_out];
  }
  for (int o = 0; o < outs; o++)
    for (int v = 0; v < vectors; v++) store(sums[o][v], to + o * each + v * lanes);
}

template <int vectors, bool adds>
inline void product(const float* a, int64_t outs, int64_t a_out, int64_t a_in, const float* b, int64_t count,
                    float* to) {
  constexpr int64_t each = vectors * lanes;
  int64_t o = 0;
  for (; o + at_once <= outs; o += at_once)
    tile<vectors, at_once, adds>(a + o * a_out, a_out, a_in, b, count, to + o * each);
  for (; o + 2 <= outs; o += 2)
    tile<vectors, 2, adds>(a + o * a_out, a_out, a_in, b, count, to + o * each);
  for (; o < outs; o++) tile<vectors, 1, adds>(a + o * a_out, a_out, a_in, b, count, to + o * each);
}

// Some queries of one head whose rows share a prompt, as the lanes of vectors.
template <int vectors>
struct Group {
  static constexpr int64_t size = vectors * lanes;
  const Work& work;
  int64_t prompt, head, first, count;  // first: counted over the queries of the prompt
  std::vector<float> transposed, sums;  // [width, size] and [out_width, size]
  alignas(64) float scores[block * size], most[size], total[size];

  Group(const Work& work, int64_t prompt, int64_t head, int64_t first, int64_t count)
      : work(work), prompt(prompt), head(head), first(first), count(count), transposed(work.width * size),
        sums(work.out_width * size) {
    std::fill(most, most + size, lowest);
    std::fill(total, total + size, 0.0f);
    for (int64_t one = 0; one < count; one++) {
      const float* from = work.queries + work.at(row_of(one), head, query_of(one)) * work.width;
      for (int64_t i = 0; i < work.width; i++) transposed[i * size + one] = from[i];
    }
  }

  int64_t row_of(int64_t one) const { return prompt * (work.rows / work.prompts) + (first + one) / work.each; }
  int64_t query_of(int64_t one) const { return (first + one) % work.each; }

  void read(const Segment& segment, int64_t begin, int64_t slots) {
    const float *keys = segment.keys.at(prompt, head, begin), *values = segment.values.at(prompt, head, begin);
    product<vectors, false>(keys, slots, segment.keys.stride, 1, transposed.data(), work.width, scores);
    if (work.mask)
      for (int64_t one = 0; one < count; one++)
        for (int64_t i = 0; i < slots; i++)
          scores[i * size + one] += work.added(row_of(one), head, query_of(one), segment.begin + begin + i);
    for (int64_t v = 0; v < size; v += lanes) weigh(v, slots);
    product<vectors, true>(values, work.out_width, 1, segment.values.stride, scores, slots, sums.data());
  }

  // Turns the scores of a vector of queries into weights.
  void weigh(int64_t v, int64_t slots) {
    const Lanes before = load(most + v);
    Lanes now = before, sum = {};
    for (int64_t i = 0; i < slots; i++) now = larger(load(scores + i * size + v), now);
    for (int64_t i = 0; i < slots; i++) {
      const Lanes weights = power(load(scores + i * size + v) - now);
      sum += weights;
      store(weights, scores + i * size + v);
    }
    const Lanes factor = power(before - now);
    store(now, most + v), store(load(total + v) * factor + sum, total + v);
    bool rescales = false;
    for (int64_t i = 0; i < lanes; i++) rescales |= factor[i] != 1;
    if (rescales)
      for (int64_t i = 0; i < work.out_width; i++) store(load(&sums[i * size + v]) * factor, &sums[i * size + v]);
  }

  void write(Work& to, int64_t share) const {
    for (int64_t one = 0; one < count; one++) {
      const int64_t at = to.of_share(share) + to.at(row_of(one), head, query_of(one));
      to.softmax[at] = {most[one], total[one]};
      for (int64_t i = 0; i < to.out_width; i++) to.sums[at * to.out_width + i] = sums[i * size + one];
    }
  }
};

// The queries from `first` to `end` of a prompt, with a share of its slots: a block of them at a time for all groups.
template <int vectors>
void read_common(Work& work, int64_t prompt, int64_t head, int64_t first, int64_t end, int64_t share) {
  constexpr int64_t size = vectors * lanes;
  std::vector<Group<vectors>> groups;
  groups.reserve((end - first + size - 1) / size);
  for (; first < end; first += size) groups.emplace_back(work, prompt, head, first, std::min(size, end - first));
  const int64_t slots = work.common_slots(), from = slots * share / work.shares, to = slots * (share + 1) / work.shares;
  for (const Segment& segment : work.common) {
    const int64_t last = std::min(segment.keys.count, to - segment.begin);
    for (int64_t begin = std::max<int64_t>(0, from - segment.begin); begin < last; begin += block)
      for (auto& group : groups) group.read(segment, begin, std::min(block, last - begin));
  }
  for (const auto& group : groups) group.write(work, share);
}

// The queries of one row and head, with the slots of its own.
struct OfRow {
  const Work& work;
  int64_t row, head;
  float* out;  // [queries, out_width]
  std::vector<Softmax> softmax;  // of each query

  OfRow(const Work& work, int64_t row, int64_t head, float* out)
      : work(work), row(row), head(head), out(out), softmax(work.each) {
    const int64_t first = work.at(row, head, 0);
    for (int64_t query = 0; query < work.each; query++) {
      Softmax& all = softmax[query];
      float* to = out + query * work.out_width;
      std::fill(to, to + work.out_width, 0.0f);
      for (int64_t share = 0; share < work.shares; share++)
        all.most = std::max(all.most, work.softmax[work.of_share(share) + first + query].most);
      for (int64_t share = 0; share < work.shares; share++) {
        const int64_t at = work.of_share(share) + first + query;
        const float factor = std::exp(work.softmax[at].most - all.most);
        all.total += work.softmax[at].total * factor;
        for (int64_t i = 0; i < work.out_width; i++) to[i] += work.sums[at * work.out_width + i] * factor;
      }
    }
  }

  template <int some>
  void score(int64_t query, const float* keys, int64_t stride, int64_t slots, float* scores) const {
    const float* asked = work.queries + work.at(row, head, query) * work.width;
    for (int64_t i = 0; i < slots; i++, keys += stride) {
      Eight sums[some] = {};
      for (int64_t at = 0; at < work.width; at += 8) {
        const Eight key = load<Eight>(keys + at);
        for (int one = 0; one < some; one++) sums[one] += key * load<Eight>(asked + one * work.width + at);
      }
      for (int one = 0; one < some; one++) scores[one * block + i] = total(sums[one]);
    }
  }

  template <int some, int vectors>
  void add(const float* values, int64_t stride, int64_t slots, const float* scores, float* to) const {
    Eight sums[some][vectors];
    for (int one = 0; one < some; one++)
      for (int v = 0; v < vectors; v++) sums[one][v] = load<Eight>(to + one * work.out_width + v * 8);
    for (int64_t i = 0; i < slots; i++, values += stride)
      for (int v = 0; v < vectors; v++) {
        const Eight value = load<Eight>(values + v * 8);
        for (int one = 0; one < some; one++) sums[one][v] += value * scores[one * block + i];
      }
    for (int one = 0; one < some; one++)
      for (int v = 0; v < vectors; v++) store(sums[one][v], to + one * work.out_width + v * 8);
  }

  template <int some>
  void read(int64_t query, const Segment& segment, int64_t begin, int64_t slots) {
    alignas(64) float scores[some * block];
    const int64_t end = (slots + 7) / 8 * 8;
    const float *keys = segment.keys.at(row, head, begin), *values = segment.values.at(row, head, begin);
    score<some>(query, keys, segment.keys.stride, slots, scores);
    for (int one = 0; one < some; one++) {
      float* of = scores + one * block;
      if (work.mask)
        for (int64_t i = 0; i < slots; i++) of[i] += work.added(row, head, query + one, segment.begin + begin + i);
      std::fill(of + slots, of + end, -std::numeric_limits<float>::infinity());
      weigh(of, end, softmax[query + one], out + (query + one) * work.out_width);
    }
    float* to = out + query * work.out_width;
    int64_t at = 0;
    for (; at + 16 <= work.out_width; at += 16)
      add<some, 2>(values + at, segment.values.stride, slots, scores, to + at);
    for (; at < work.out_width; at += 8)
      add<some, 1>(values + at, segment.values.stride, slots, scores, to + at);
  }

  void weigh(float* scores, int64_t slots, Softmax& softmax, float* sums) const {
    Eight largest = Eight{} + softmax.most, sum = {};
    for (int64_t i = 0; i < slots; i += 8) largest = larger(load<Eight>(scores + i), largest);
    float now = softmax.most;
    for (int64_t i = 0; i < 8; i++) now = std::max(now, largest[i]);
    if (now != softmax.most) {
      const float factor = std::exp(softmax.most - now);
      softmax = {now, softmax.total * factor};
      for (int64_t i = 0; i < work.out_width; i++) sums[i] *= factor;
    }
    for (int64_t i = 0; i < slots; i += 8) {
      const Eight weights = power(load<Eight>(scores + i) - now);
      store(weights, scores + i);
      sum += weights;
    }
    softmax.total += total(sum);
  }

  void read_own() {
    for (const Segment& segment : work.own)
      for (int64_t begin = 0; begin < segment.keys.count; begin += block) {
        const int64_t slots = std::min(block, segment.keys.count - begin);
        int64_t query = 0;
        for (; query + 4 <= work.each; query += 4) read<4>(query, segment, begin, slots);
        if (work.each - query == 3) read<3>(query, segment, begin, slots);
        if (work.each - query == 2) read<2>(query, segment, begin, slots);
        if (work.each - query == 1) read<1>(query, segment, begin, slots);
      }
    for (int64_t query = 0; query < work.each; query++)
      if (const float total = softmax[query].total; total != 0)  // else the query sees no slot
        for (int64_t i = 0; i < work.out_width; i++) out[query * work.out_width + i] /= total;
  }
};

template <class Function>
void in_parallel(int64_t tasks, const Function& function) {
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, tasks, std::max<int64_t>(1, (tasks + threads - 1) / threads),
    [&function](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; task++) function(task);
    });
}

// queries: scaled, [rows, KV heads, queries per KV head, width]. tensors: the keys of each segment, then the values of
// each, [rows or prompts, KV heads, slots, width]; consecutive rows share those of a prompt, which come first. mask:
// added to the scores, [rows, KV heads, queries per KV head, slots]. All widths are multiples of 8. Returns
// [rows, KV heads, queries per KV head, width of a value].
Tensor shared_attention(Tensor given, std::vector<Tensor> tensors, std::optional<Tensor> mask) {
  const Tensor queries = torch::stable::contiguous(given);
  const size_t segments = tensors.size() / 2;
  Work work{static_cast<const float*>(queries.const_data_ptr()), nullptr, queries.size(0), queries.size(1),
            queries.size(2), queries.size(3), tensors.back().size(3), tensors[0].size(0)};
  int64_t slots = 0;
  for (size_t i = 0; i < segments; i++) {
    const Segment segment{Slots(tensors[i]), Slots(tensors[segments + i]), slots};
    (segment.keys.rows == work.rows ? work.own : work.common).push_back(segment);
    slots += segment.keys.count;
  }
  if (mask) {
    work.mask = static_cast<const float*>(mask->const_data_ptr());
    for (int64_t axis = 0; axis < 4; axis++) work.mask_strides[axis] = mask->stride(axis);
  }
  // Two tasks for each thread at least, for then all threads have work until the end.
  constexpr int64_t size = 2 * lanes;
  const int64_t asked = work.of_prompt(), heads = work.prompts * work.heads, groups = (asked + size - 1) / size;
  const int64_t wanted = 2 * torch::stable::get_num_threads();
  int64_t at_once_groups = std::min(groups, most_groups);
  while (at_once_groups > 1 && heads * ((groups + at_once_groups - 1) / at_once_groups) < wanted) at_once_groups--;
  const int64_t parts = (groups + at_once_groups - 1) / at_once_groups;
  const int64_t most_shares = std::max<int64_t>(1, work.common_slots() / (4 * block));
  work.shares = std::min(most_shares, (wanted + heads * parts - 1) / (heads * parts));
  work.softmax.resize(work.of_share(work.shares));
  work.sums.resize(work.of_share(work.shares) * work.out_width);
  in_parallel(heads * parts * work.shares, [&](int64_t task) {
    const int64_t share = task % work.shares, part = task / work.shares % parts;
    const int64_t head = task / work.shares / parts % work.heads, prompt = task / work.shares / parts / work.heads;
    const int64_t first = part * at_once_groups * size, end = std::min(asked, first + at_once_groups * size);
    const int64_t of_two = (end - first + lanes - 1) / size * size;  // a last group of one vector may be left
    if (of_two > 0) read_common<2>(work, prompt, head, first, std::min(end, first + of_two), share);
    if (first + of_two < end) read_common<1>(work, prompt, head, first + of_two, end, share);
  });
  Tensor out = torch::stable::new_empty(queries, {work.rows, work.heads, work.each, work.out_width});
  float* to = static_cast<float*>(out.mutable_data_ptr());
  in_parallel(work.rows * work.heads, [&](int64_t task) {
    OfRow(work, task / work.heads, task % work.heads, to + task * work.each * work.out_width).read_own();
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvengine, library) {
  library.def("shared_attention(Tensor queries, Tensor[] tensors, Tensor? mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) { library.impl("shared_attention", TORCH_BOX(&shared_attention)); }
