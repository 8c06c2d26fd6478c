// Attention to the slots of each row, joined with what the row finds in those it shares.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "in_parallel.h"
#include "query_lanes.h"
#include "softmax.h"
#include "work.h"

namespace {

constexpr int most_summed = lanes == 16 ? 4 : 2;  // vectors of a value that `OfRow` sums up at once

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
  template <class Vector, int some, class Element>
  void score(const float* asked, const HeadSlots<Element>& keys, int64_t slot, float* scores) const {
    const Element* from[4];
    for (int i = 0; i < 4; i++) from[i] = keys.data + std::min(slot + i, keys.count - 1) * keys.stride;
    Vector sums[some][4] = {};
    for (int64_t at = 0; at < work.width; at += sizeof(Vector) / sizeof(float))
      for (int one = 0; one < some; one++) {
        const Vector of_query = load<Vector>(asked + one * work.width + at);
        for (int i = 0; i < 4; i++) sums[one][i] += of_query * floats<Vector>(from[i] + at);
      }
    for (int one = 0; one < some; one++) store(totals(sums[one]), scores + one * block + slot);
  }

  // Adds some vectors of the weighted values of all slots. Prefetches the keys of the next ones.
  template <class Vector, int some, int vectors, class Element>
  void add(const HeadSlots<Element>& values, int64_t at, const float* scores, float* to,
           const HeadSlots<Element>& next) const {
    constexpr int64_t size = sizeof(Vector) / sizeof(float);
    const Element* from = values.data + at;
    Vector sums[some][vectors];
    for (int one = 0; one < some; one++)
      for (int v = 0; v < vectors; v++) sums[one][v] = load<Vector>(to + one * work.out_width + at + v * size);
    for (int64_t i = 0; i < values.count; i++, from += values.stride) {
      next.prefetch(i, at, at + vectors * size);
      for (int v = 0; v < vectors; v++) {
        const Vector value = floats<Vector>(from + v * size);
        for (int one = 0; one < some; one++) sums[one][v] += value * scores[one * block + i];
      }
    }
    for (int one = 0; one < some; one++)
      for (int v = 0; v < vectors; v++) store(sums[one][v], to + one * work.out_width + at + v * size);
  }

  // Some queries with a block of slots, the next of which are prefetched.
  template <class Vector, int some, class Element>
  void read(int64_t query, const HeadSlots<Element>& keys, const HeadSlots<Element>& values,
            const HeadSlots<Element>& next, int64_t mask_at) {
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
      std::fill(of + slots, of + end, unseen);
      weigh(of, end, softmax[query + one], out + (query + one) * work.out_width, work.out_width);
    }
    float* to = out + query * work.out_width;
    int64_t at = 0;
    for (; at + most_summed * size <= work.out_width; at += most_summed * size)
      add<Vector, some, most_summed>(values, at, scores, to, next);
    for (; at < work.out_width; at += size) add<Vector, some, 1>(values, at, scores, to, next);
  }

  template <class Vector, class Element>
  void read_from(const Segment& segment, int64_t begin, int64_t end) {
    for (; begin < end; begin += block) {
      const int64_t slots = std::min(block, end - begin), mask_at = segment.begin + begin;
      const auto keys = segment.keys.of<Element>(row - part.first, head, begin, slots);
      const auto values = segment.values.of<Element>(row - part.first, head, begin, slots);
      auto next = segment.keys.of<Element>(row - part.first, head, begin + slots, std::min(block, end - begin - slots));
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
      with_element(segment.keys.type, [&](auto element) {
        if (fill_lanes) read_from<Lanes, decltype(element)>(segment, begin, end);
        else read_from<Eight, decltype(element)>(segment, begin, end);
      });
    }
  }
};

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

}  // namespace
