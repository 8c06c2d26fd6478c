// Attention over the float32 keys and values of many rows, each of its own length. Where rows share those of a prompt,
// their queries are the lanes of vectors, so that a key is read once for all of them.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in seconds
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels/in_parallel.h"
#include "kernels/lanes.h"
#include "kernels/prompt.h"
#include "kernels/query_lanes.h"
#include "kernels/slots.h"

namespace {

constexpr auto Float = torch::headeronly::ScalarType::Float, Bool = torch::headeronly::ScalarType::Bool;

constexpr int most_summed = lanes == 16 ? 4 : 2;  // vectors of a value that `OfRow` sums up at once
constexpr int64_t most_groups = 4;  // groups of queries that read a block of keys one after another

struct Segment {
  Slots keys, values;
  int64_t begin;  // its first slot in the mask
};

// Softmax so far of one query: the largest score, and the sum of exp(score - largest).
struct Softmax {
  float most = lowest, total = 0;
};

// Adds the softmax and the sums [width] of a query over other slots.
inline void join(Softmax& all, float* sums, const Softmax& other, const float* of_other, int64_t width) {
  const float most = std::max(all.most, other.most);
  const float factor = std::exp(all.most - most), of_others = std::exp(other.most - most);
  for (int64_t i = 0; i < width; i++) sums[i] = sums[i] * factor + of_other[i] * of_others;
  all = {most, all.total * factor + other.total * of_others};
}

// Consecutive rows: of one cache.
struct Part {
  int64_t first, rows, prompts;
  std::vector<Segment> common, own;  // of prompts, and of rows
  int64_t common_slots = 0;
  int64_t shares = 0;  // of the common slots, each with a softmax of its own
  int64_t at = 0;  // where those of its queries begin: [shares, rows, heads, queries]
};

struct Work {
  const float* queries;  // [rows, heads, queries, width]
  const float* mask;  // or null
  int64_t rows, heads, each, width, out_width;  // each: queries per row and head
  int64_t mask_strides[4];
  std::vector<Part> parts;
  std::vector<float> sums;  // of each softmax of the common slots [out_width]
  std::vector<Softmax> softmax;

  int64_t at(int64_t row, int64_t head, int64_t query) const { return (row * heads + head) * each + query; }

  int64_t common_at(const Part& part, int64_t share, int64_t row, int64_t head, int64_t query) const {
    return part.at + at(share * part.rows + row - part.first, head, query);
  }

  float added(int64_t row, int64_t head, int64_t query, int64_t slot) const {
    return mask[row * mask_strides[0] + head * mask_strides[1] + query * mask_strides[2] + slot * mask_strides[3]];
  }
};

// Some queries of one head whose rows share a prompt.
template <int vectors>
struct Group {
  const Work& work;
  const Part& part;
  int64_t prompt, head, first, count;  // first: counted over the queries of the prompt
  QueryLanes<vectors> queries;

  Group(const Work& work, const Part& part, int64_t prompt, int64_t head, int64_t first, int64_t count)
      : work(work), part(part), prompt(prompt), head(head), first(first), count(count),
        queries(work.width, work.out_width) {
    for (int64_t one = 0; one < count; one++)
      queries.set(one, work.queries + work.at(row_of(one), head, query_of(one)) * work.width, 1);
  }

  int64_t row_of(int64_t one) const {
    return part.first + prompt * (part.rows / part.prompts) + (first + one) / work.each;
  }
  int64_t query_of(int64_t one) const { return (first + one) % work.each; }

  void read(const Segment& segment, int64_t begin, int64_t slots) {
    queries.score(segment.keys.of(prompt, head, begin, slots));
    if (work.mask)
      for (int64_t one = 0; one < count; one++)
        for (int64_t i = 0; i < slots; i++)
          queries.scores[i * queries.size + one] +=
            work.added(row_of(one), head, query_of(one), segment.begin + begin + i);
    queries.add(segment.values.of(prompt, head, begin, slots));
  }

  void write(Work& to, int64_t share) const {
    for (int64_t one = 0; one < count; one++) {
      const int64_t at = to.common_at(part, share, row_of(one), head, query_of(one));
      to.softmax[at] = {queries.most[one], queries.total[one]};
      for (int64_t i = 0; i < to.out_width; i++)
        to.sums[at * to.out_width + i] = queries.sums[i * queries.size + one];
    }
  }
};

// The queries from `first` to `end` of one head of a prompt, and a share of its slots.
struct Task {
  int64_t part, prompt, head, first, end, share;
};

// A block of slots at a time for all groups of queries.
template <int vectors>
void read_common(Work& work, const Task& task, int64_t first, int64_t end) {
  const Part& part = work.parts[task.part];
  constexpr int64_t size = vectors * lanes;
  std::vector<Group<vectors>> groups;
  groups.reserve((end - first + size - 1) / size);
  for (; first < end; first += size)
    groups.emplace_back(work, part, task.prompt, task.head, first, std::min(size, end - first));
  int64_t from = part.common_slots * task.share / part.shares, to = part.common_slots * (task.share + 1) / part.shares;
  for (const Segment& segment : part.common) {
    const int64_t last = std::min(segment.keys.count, to);
    for (int64_t begin = std::max<int64_t>(0, from); begin < last; begin += block)
      for (auto& group : groups) group.read(segment, begin, std::min(block, last - begin));
    from -= segment.keys.count, to -= segment.keys.count;
  }
  for (const auto& group : groups) group.write(work, task.share);
}

// The queries of one row and head, with the slots of its own.
struct OfRow {
  const Work& work;
  const Part& part;
  int64_t row, head;
  float* out;  // [queries, out_width]
  Softmax* softmax;  // of each query

  void read_common() {
    for (int64_t share = 0; share < part.shares; share++)
      for (int64_t query = 0; query < work.each; query++) {
        const int64_t at = work.common_at(part, share, row, head, query), width = work.out_width;
        join(softmax[query], out + query * width, work.softmax[at], &work.sums[at * width], width);
      }
  }

  // The scores of four slots from `slot` on. Slots after the last get the score of the last.
  template <class Vector, int some>
  void score(const float* asked, const HeadSlots& keys, int64_t slot, float* scores) const {
    const float* from[4];
    for (int i = 0; i < 4; i++) from[i] = keys.data + std::min(slot + i, keys.count - 1) * keys.stride;
    Vector sums[some][4] = {};
    for (int64_t at = 0; at < work.width; at += sizeof(Vector) / sizeof(float))
      for (int one = 0; one < some; one++) {
        const Vector of_query = load<Vector>(asked + one * work.width + at);
        for (int i = 0; i < 4; i++) sums[one][i] += of_query * load<Vector>(from[i] + at);
      }
    for (int one = 0; one < some; one++) store(totals(sums[one]), scores + one * block + slot);
  }

  // Adds some vectors of the weighted values of all slots. Prefetches the keys of the next ones.
  template <class Vector, int some, int vectors>
  void add(const HeadSlots& values, int64_t at, const float* scores, float* to, const HeadSlots& next) const {
    constexpr int64_t size = sizeof(Vector) / sizeof(float);
    const float* from = values.data + at;
    Vector sums[some][vectors];
    for (int one = 0; one < some; one++)
      for (int v = 0; v < vectors; v++) sums[one][v] = load<Vector>(to + one * work.out_width + at + v * size);
    for (int64_t i = 0; i < values.count; i++, from += values.stride) {
      next.prefetch(i, at, at + vectors * size);
      for (int v = 0; v < vectors; v++) {
        const Vector value = load<Vector>(from + v * size);
        for (int one = 0; one < some; one++) sums[one][v] += value * scores[one * block + i];
      }
    }
    for (int one = 0; one < some; one++)
      for (int v = 0; v < vectors; v++) store(sums[one][v], to + one * work.out_width + at + v * size);
  }

  // Some queries with a block of slots, the next of which are prefetched.
  template <class Vector, int some>
  void read(int64_t query, const HeadSlots& keys, const HeadSlots& values, const HeadSlots& next, int64_t mask_at) {
    constexpr int64_t size = sizeof(Vector) / sizeof(float);
    alignas(64) float scores[some * block];
    const float* asked = work.queries + work.at(row, head, query) * work.width;
    const int64_t slots = keys.count, end = (slots + 7) / 8 * 8;
    for (int64_t slot = 0; slot < slots; slot += 4) {
      for (int64_t i = slot; query == 0 && i < slot + 4; i++) values.prefetch(i, 0, work.out_width);
      score<Vector, some>(asked, keys, slot, scores);
    }
    for (int one = 0; one < some; one++) {
      float* of = scores + one * block;
      if (work.mask)
        for (int64_t i = 0; i < slots; i++) of[i] += work.added(row, head, query + one, mask_at + i);
      std::fill(of + slots, of + end, -std::numeric_limits<float>::infinity());
      weigh(of, end, softmax[query + one], out + (query + one) * work.out_width);
    }
    float* to = out + query * work.out_width;
    int64_t at = 0;
    for (; at + most_summed * size <= work.out_width; at += most_summed * size)
      add<Vector, some, most_summed>(values, at, scores, to, next);
    for (; at < work.out_width; at += size) add<Vector, some, 1>(values, at, scores, to, next);
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

  template <class Vector>
  void read_from(const Segment& segment, int64_t begin, int64_t end) {
    for (; begin < end; begin += block) {
      const int64_t slots = std::min(block, end - begin), mask_at = segment.begin + begin;
      const HeadSlots keys = segment.keys.of(row - part.first, head, begin, slots);
      const HeadSlots values = segment.values.of(row - part.first, head, begin, slots);
      HeadSlots next = segment.keys.of(row - part.first, head, begin + slots, std::min(block, end - begin - slots));
      int64_t query = 0;
      for (; query + 4 <= work.each; query += 4, next.count = 0) read<Vector, 4>(query, keys, values, next, mask_at);
      if (work.each - query == 3) read<Vector, 3>(query, keys, values, next, mask_at);
      if (work.each - query == 2) read<Vector, 2>(query, keys, values, next, mask_at);
      if (work.each - query == 1) read<Vector, 1>(query, keys, values, next, mask_at);
    }
  }

  // A share of the slots of its own.
  void read_own(int64_t share, int64_t shares) {
    const bool fill_lanes = work.width % lanes == 0 && work.out_width % lanes == 0;
    for (const Segment& segment : part.own) {
      const int64_t begin = segment.keys.count * share / shares, end = segment.keys.count * (share + 1) / shares;
      if (fill_lanes) read_from<Lanes>(segment, begin, end);
      else read_from<Eight>(segment, begin, end);
    }
  }
};

// The rows of a cache. layout: their number, and how many segments they have. Those are read in this order.
Part part_of(int64_t first, const int64_t* layout, const Tensor* keys, const Tensor* values, int64_t mask_slots) {
  Part part{first, layout[0], keys[0].size(0)};
  int64_t slots = 0;
  for (int64_t i = 0; i < layout[1]; i++) slots += keys[i].size(2);
  STD_TORCH_CHECK(mask_slots < 0 || slots <= mask_slots, "a mask of ", mask_slots, " slots for ", slots);
  for (int64_t i = 0, begin = mask_slots - slots; i < layout[1]; i++) {
    const Segment segment{Slots(keys[i]), Slots(values[i]), begin};
    const bool is_own = segment.keys.rows == part.rows;
    STD_TORCH_CHECK(segment.keys.count == segment.values.count && segment.keys.rows == segment.values.rows &&
                      (is_own || (segment.keys.rows == part.prompts && part.rows % part.prompts == 0)),
                    "a segment does not fit its cache of ", part.rows, " rows");
    (is_own ? part.own : part.common).push_back(segment);
    part.common_slots += is_own ? 0 : segment.keys.count;
    begin += segment.keys.count;
  }
  return part;
}

// What reads the common slots: some tasks for each thread, for then all threads have work until the end.
std::vector<Task> tasks_of(Work& work) {
  constexpr int64_t size = most_vectors * lanes;
  const int64_t wanted = 2 * torch::stable::get_num_threads();
  std::vector<Task> tasks;
  int64_t at = 0;
  for (int64_t number = 0; number < static_cast<int64_t>(work.parts.size()); number++) {
    Part& part = work.parts[number];
    if (part.common.empty()) continue;
    const int64_t asked = part.rows / part.prompts * work.each, heads = part.prompts * work.heads;
    const int64_t groups = (asked + size - 1) / size;
    int64_t together = std::min(groups, most_groups);
    while (together > 1 && heads * ((groups + together - 1) / together) < wanted) together--;
    const int64_t runs = heads * ((groups + together - 1) / together);
    part.shares = std::min(std::max<int64_t>(1, part.common_slots / (4 * block)), (wanted + runs - 1) / runs);
    part.at = at, at += part.shares * part.rows * work.heads * work.each;
    for (int64_t prompt = 0; prompt < part.prompts; prompt++)
      for (int64_t head = 0; head < work.heads; head++)
        for (int64_t first = 0; first < asked; first += together * size)
          for (int64_t share = 0; share < part.shares; share++)
            tasks.push_back({number, prompt, head, first, std::min(asked, first + together * size), share});
  }
  work.softmax.resize(at), work.sums.resize(at * work.out_width);
  return tasks;
}

// How many shares the own slots of each row are read in: more than one where the heads of all rows, as tasks, would
// leave threads without work.
int64_t shares_of_own(const Work& work) {
  const int64_t threads = torch::stable::get_num_threads(), tasks = work.rows * work.heads;
  const int64_t rounds = (tasks + threads - 1) / threads;
  if (10 * rounds * threads <= 11 * tasks) return 1;
  int64_t most = 0;
  for (const Part& part : work.parts)
    for (const Segment& segment : part.own) most = std::max(most, segment.keys.count);
  const int64_t even = threads / std::gcd(tasks, threads), enough = (4 * threads + tasks - 1) / tasks;
  return std::max<int64_t>(1, std::min({even, enough, most / (2 * block)}));
}

// What each row finds: in the slots that it shares, and in its own. out: [rows, heads, each, out_width].
void read_rows(const Work& work, const std::vector<int64_t>& part_of_row, float* out) {
  const int64_t count = work.heads * work.rows, shares = shares_of_own(work), width = work.out_width;
  const int64_t queries = count * work.each;
  std::vector<Softmax> softmax(shares * queries);
  std::vector<float> others((shares - 1) * queries * width);  // sums of all shares but the first
  std::fill(out, out + queries * width, 0.0f);
  const auto sums_of = [&](int64_t share, int64_t query) {
    return share == 0 ? out + query * width : &others[((share - 1) * queries + query) * width];
  };
  // Neighbours are rows, which may have different lengths: a thread takes some of all.
  const auto first_of = [&](int64_t number) { return work.at(number % work.rows, number / work.rows, 0); };
  const auto finish = [&](int64_t number) {
    for (int64_t query = first_of(number), end = query + work.each; query < end; query++) {
      Softmax& all = softmax[query];
      float* sums = sums_of(0, query);
      for (int64_t share = 1; share < shares; share++)
        join(all, sums, softmax[share * queries + query], sums_of(share, query), width);
      if (all.total != 0)  // else the query sees no slot
        for (int64_t i = 0; i < width; i++) sums[i] /= all.total;
    }
  };
  in_parallel(shares * count, [&](int64_t task) {
    const int64_t share = task / count, number = task % count, row = number % work.rows, first = first_of(number);
    OfRow of_row{work, work.parts[part_of_row[row]], row, number / work.rows, sums_of(share, first),
                 &softmax[share * queries + first]};
    if (share == 0) of_row.read_common();
    of_row.read_own(share, shares);
    if (shares == 1) finish(number);
  });
  if (shares > 1) in_parallel(count, finish);
}

void check_fit(const Work& work, int64_t rows, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
               const std::optional<Tensor>& mask) {
  STD_TORCH_CHECK(rows == work.rows, "queries of ", work.rows, " rows for caches of ", rows);
  for (const Tensor& of : keys)
    STD_TORCH_CHECK(of.size(1) == work.heads && of.size(3) == work.width, "keys that do not fit the queries");
  for (const Tensor& of : values)
    STD_TORCH_CHECK(of.size(1) == work.heads && of.size(3) == work.out_width, "values that do not fit the queries");
  const int64_t sizes[] = {work.rows, work.heads, work.each};
  for (int64_t axis = 0; mask && axis < 3; axis++)
    STD_TORCH_CHECK(mask->size(axis) == 1 || mask->size(axis) == sizes[axis], "a mask that does not fit the queries");
}

void check_segments(const Tensor& queries, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                    const std::vector<int64_t>& parts, const std::optional<Tensor>& mask) {
  size_t segments = 0;
  bool are_counts = parts.size() % 2 == 0 && !parts.empty();
  for (size_t i = 1; are_counts && i < parts.size(); i += 2) are_counts = parts[i] > 0, segments += parts[i];
  STD_TORCH_CHECK(are_counts && segments == keys.size() && segments == values.size(), keys.size(),
                  " segments of keys and ", values.size(), " of values, which are not those of the caches");
  bool are_floats = queries.scalar_type() == Float && (!mask || mask->scalar_type() == Float);
  for (const auto* of : {&keys, &values})
    for (const Tensor& one : *of) are_floats = are_floats && one.scalar_type() == Float;
  STD_TORCH_CHECK(are_floats, "tensors of another data type than float32");
}

// Copies the rows of `from` [rows, heads, 1, width] that begin at `first` to the last slots of `to`.
void copy_last(const Tensor& from, int64_t first, const Tensor& to) {
  int64_t sizes[4], out_of[4], into[4];  // asking a tensor takes longer than copying a number
  for (int64_t axis = 0; axis < 4; axis++)
    sizes[axis] = to.size(axis), out_of[axis] = from.stride(axis), into[axis] = to.stride(axis);
  const float* source = static_cast<const float*>(from.const_data_ptr()) + first * out_of[0];
  float* target = static_cast<float*>(to.mutable_data_ptr()) + (sizes[2] - 1) * into[2];
  for (int64_t row = 0; row < sizes[0]; row++)
    for (int64_t head = 0; head < sizes[1]; head++)
      for (int64_t i = 0; i < sizes[3]; i++)
        target[row * into[0] + head * into[1] + i] = source[row * out_of[0] + head * out_of[1] + i * out_of[3]];
}

void append(const Work& work, const Tensor& key, const Tensor& value, const std::vector<Tensor>& keys,
            const std::vector<Tensor>& values) {
  for (const auto& [one, width] : {std::pair(&key, work.width), std::pair(&value, work.out_width)})
    STD_TORCH_CHECK(one->size(0) == work.rows && one->size(1) == work.heads && one->size(2) == 1 &&
                      one->size(3) == width && one->scalar_type() == Float,
                    "new keys or values of ", one->size(0), " rows, ", one->size(1), " heads of size ", one->size(3),
                    " in caches of ", work.rows, " rows, ", work.heads, " heads of size ", width, " in float32");
  std::vector<size_t> last;
  for (const Part& part : work.parts) {
    last.push_back((last.empty() ? -1 : last.back()) + part.common.size() + part.own.size());
    STD_TORCH_CHECK(keys[last.back()].size(0) == part.rows && keys[last.back()].size(2) > 0,
                    "a cache of ", part.rows, " rows without a slot for the new token of each");
  }
  for (size_t i = 0; i < last.size(); i++)
    for (const auto& [from, to] : {std::pair(&key, &keys[last[i]]), std::pair(&value, &values[last[i]])})
      copy_last(*from, work.parts[i].first, *to);
}

// The queries, times `scale`.
std::vector<float> scaled(const Tensor& queries, float scale) {
  int64_t sizes[4], strides[4];
  for (int64_t axis = 0; axis < 4; axis++) sizes[axis] = queries.size(axis), strides[axis] = queries.stride(axis);
  std::vector<float> found(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
  const float* data = static_cast<const float*>(queries.const_data_ptr());
  float* to = found.data();
  for (int64_t row = 0; row < sizes[0]; row++)
    for (int64_t head = 0; head < sizes[1]; head++)
      for (int64_t query = 0; query < sizes[2]; query++) {
        const float* from = data + row * strides[0] + head * strides[1] + query * strides[2];
        for (int64_t i = 0; i < sizes[3]; i++) *to++ = from[i * strides[3]] * scale;
      }
  return found;
}

// queries: [rows, heads, tokens, width]; as many consecutive heads read each KV head. scale: of their products with
// keys. parts: for each cache, whose rows follow one another, the number of its rows and of its segments. keys, values:
// of each segment, [rows or prompts of its cache, KV heads, slots, width]; as many consecutive rows share those of each
// prompt, which come first. mask: added to the scores, [rows, KV heads, queries per KV head, slots] or 1 where it is the
// same for all, the last slots of each row. All widths are multiples of 8. Returns [rows, heads, tokens, width of a
// value].
// new_key, new_value: see `layer_attention`; null for none.
Tensor attend(const Tensor& queries, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
              const std::vector<int64_t>& parts, const std::optional<Tensor>& mask, double scale, const Tensor* new_key,
              const Tensor* new_value) {
  check_segments(queries, keys, values, parts, mask);
  const int64_t heads = keys[0].size(1), asked = queries.size(1) * queries.size(2);
  STD_TORCH_CHECK(asked % heads == 0, asked, " queries of a row for ", heads, " heads");
  const std::vector<float> of_queries = scaled(queries, scale);
  Work work{of_queries.data(), nullptr, queries.size(0), heads, asked / heads, queries.size(3), values[0].size(3)};
  if (mask) {
    work.mask = static_cast<const float*>(mask->const_data_ptr());
    for (int64_t axis = 0; axis < 4; axis++) work.mask_strides[axis] = mask->size(axis) == 1 ? 0 : mask->stride(axis);
  }
  std::vector<int64_t> part_of_row;
  for (size_t i = 0, segment = 0; i < parts.size(); segment += parts[i + 1], i += 2) {
    const int64_t first = part_of_row.size();
    work.parts.push_back(part_of(first, &parts[i], &keys[segment], &values[segment], mask ? mask->size(3) : -1));
    part_of_row.resize(first + parts[i], i / 2);
  }
  check_fit(work, part_of_row.size(), keys, values, mask);
  if (new_key) append(work, *new_key, *new_value, keys, values);
  const std::vector<Task> tasks = tasks_of(work);
  in_parallel(tasks.size(), [&](int64_t number) {
    const Task& task = tasks[number];
    const int64_t vectors = (task.end - task.first + lanes - 1) / lanes, rest = vectors % most_vectors;
    const int64_t last = rest ? task.first + (vectors - rest) * lanes : task.end;  // a smaller group
    if (last > task.first) read_common<most_vectors>(work, task, task.first, last);
    if (rest == 1) read_common<1>(work, task, last, task.end);
    if (rest == 2) read_common<2>(work, task, last, task.end);
  });
  Tensor out = torch::stable::new_empty(queries, {work.rows, queries.size(1), queries.size(2), work.out_width});
  read_rows(work, part_of_row, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

Tensor dense_attention(Tensor queries, std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<int64_t> parts,
                       std::optional<Tensor> mask, double scale) {
  return attend(queries, keys, values, parts, mask, scale, nullptr, nullptr);
}

// Attention of several tokens per row. query: [rows, heads, tokens, width]. key, value: [rows, KV heads, slots, width],
// of as many consecutive heads each. mask: bool [rows or 1, 1, tokens, slots], whether a token sees a slot. is_causal:
// with no mask, token i sees i + 1 slots. Returns [rows, tokens, heads, width of a value]; zeros where a token sees no slot.
Tensor prompt_attention(Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask, bool is_causal,
                        double scale) {
  const int64_t rows = query.size(0), heads = key.size(1), tokens = query.size(2), slots = key.size(2);
  for (const Tensor& one : {query, key, value})
    STD_TORCH_CHECK(one.scalar_type() == Float && one.stride(3) == 1, "not contiguous vectors of float32");
  STD_TORCH_CHECK(key.size(0) == rows && query.size(1) % heads == 0 && key.size(3) == query.size(3) &&
                    value.size(0) == rows && value.size(1) == heads && value.size(2) == slots,
                  "keys and values that do not fit the queries");
  STD_TORCH_CHECK(!mask || (mask->scalar_type() == Bool && mask->stride(3) == 1 && mask->size(1) == 1 &&
                            mask->size(2) == tokens && mask->size(3) == slots &&
                            (mask->size(0) == rows || mask->size(0) == 1)),
                  "a mask that does not fit the queries");
  std::vector<Visible> visible(rows * tokens);
  for (int64_t token = 0; !mask && token < rows * tokens; token++)
    visible[token] = {0, is_causal ? std::min(token % tokens + 1, slots) : slots, nullptr};
  if (mask) {
    const bool* of_mask = static_cast<const bool*>(mask->const_data_ptr());
    const int64_t of_row = mask->size(0) > 1 ? mask->stride(0) : 0, of_token = mask->stride(2);
    in_parallel(rows * tokens, [&](int64_t token) {
      visible[token] = visible_by(of_mask + token / tokens * of_row + token % tokens * of_token, slots);
    });
  }
  Tensor out = torch::stable::new_empty(query, {rows, tokens, query.size(1), value.size(3)});
  read_prompt({static_cast<const float*>(query.const_data_ptr()), query.stride(0), query.stride(1), query.stride(2),
               Slots(key), Slots(value), rows, heads, query.size(1) / heads, tokens, query.size(3), value.size(3),
               static_cast<float>(scale), visible.data(), static_cast<float*>(out.mutable_data_ptr())});
  return out;
}

// What the layers of a step attend to, from `open_layers` to `close_layers` in the same thread.
struct OpenLayer {
  std::vector<Tensor> keys, values;
  double scale;
};
struct OpenStep {
  std::vector<OpenLayer> layers;
  std::vector<int64_t> parts;  // of every layer
  std::optional<Tensor> mask;
  size_t next = 0;  // layer
};
thread_local OpenStep open_step;

void close_layers() { open_step = {}; }

bool can_be_read(const Tensor& one) {
  return one.dim() == 4 && one.scalar_type() == Float && one.is_cpu() && one.size(3) % 8 == 0 && one.stride(3) == 1;
}

// keys, values: of one layer after the other, as for `dense_attention`, and the last slots of the last segment of each
// cache are not written yet: `layer_attention` writes them. parts: of every layer. mask: of all slots of the longest
// cache. scales: one for each layer. Returns whether `layer_attention` can attend to them; otherwise nothing is open.
bool open_layers(std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<int64_t> parts,
                 std::optional<Tensor> mask, std::vector<double> scales) {
  close_layers();
  for (const auto* of : {&keys, &values})
    for (const Tensor& one : *of)
      if (!can_be_read(one)) return false;
  STD_TORCH_CHECK(!scales.empty() && values.size() == keys.size() && keys.size() % scales.size() == 0, keys.size(),
                  " segments of keys and ", values.size(), " of values, which are not those of ", scales.size(),
                  " layers");
  const size_t segments = keys.size() / scales.size();
  OpenStep step{{}, std::move(parts), std::move(mask)};
  for (size_t layer = 0; layer < scales.size(); layer++) {
    const size_t at = layer * segments;
    step.layers.push_back({{keys.begin() + at, keys.begin() + at + segments},
                           {values.begin() + at, values.begin() + at + segments}, scales[layer]});
  }
  open_step = std::move(step);
  return true;
}

Tensor layer_attention_in_python(const Tensor& query, const Tensor& key, const Tensor& value) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(query), torch::stable::detail::from(key),
                                    torch::stable::detail::from(value)};
  // It keeps its errors. What is raised before it can is raised by the handler of a signal.
  if (torch_call_dispatcher("kvengine::layer_attention_in_python", "", stack.data(), TORCH_ABI_VERSION))
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
    throw std::runtime_error(torch_exception_get_what_without_backtrace());
#else
    throw std::runtime_error("KeyboardInterrupt: ");  // most likely
#endif
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Attention of a compiled layer. query: [rows, heads, tokens, width]. key, value: of its new tokens, [rows, KV heads,
// tokens, width]. Returns [rows, tokens, heads, width].
//
// Open layers are computed in their order: the slots that are not written yet take the key and value of the one token of
// each row first. What does not fit is not written. Where no layer is open, the package `engine` computes it in Python.
Tensor layer_attention(Tensor query, Tensor key, Tensor value) {
  if (open_step.layers.empty()) return layer_attention_in_python(query, key, value);
  STD_TORCH_CHECK(open_step.next < open_step.layers.size(), "all of ", open_step.layers.size(),
                  " open layers are computed already");
  const OpenLayer& of = open_step.layers[open_step.next++];
  const Tensor found = attend(query, of.keys, of.values, open_step.parts, open_step.mask, of.scale, &key, &value);
  return torch::stable::transpose(found, 1, 2);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvengine, library) {
  library.def("close_layers() -> ()");
  library.def(
    "dense_attention(Tensor queries, Tensor[] keys, Tensor[] values, int[] parts, Tensor? mask, float scale)"
    " -> Tensor");
  library.def("layer_attention(Tensor query, Tensor key, Tensor value) -> Tensor");
  library.def(
    "prompt_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> Tensor");
  library.def(
    "open_layers(Tensor(a!)[] keys, Tensor(b!)[] values, int[] parts, Tensor? mask, float[] scales) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CPU, library) {
  library.impl("dense_attention", TORCH_BOX(&dense_attention));
  library.impl("layer_attention", TORCH_BOX(&layer_attention));
  library.impl("open_layers", TORCH_BOX(&open_layers));
  library.impl("prompt_attention", TORCH_BOX(&prompt_attention));
}

STABLE_TORCH_LIBRARY_IMPL(kvengine, CompositeExplicitAutograd, library) {
  library.impl("close_layers", TORCH_BOX(&close_layers));
}
