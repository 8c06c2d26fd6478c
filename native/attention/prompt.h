// Attention of several tokens per row to the keys and values of their row.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "in_parallel.h"
#include "query_lanes.h"
#include "slots.h"

namespace {

// The slots that a token sees: those from `begin` to `end`, unless the mask hides some of them.
struct Visible {
  int64_t begin, end;
  const uint8_t* mask;  // of all slots, not 0 for those visible; null where it hides none of these
};

inline int64_t first_visible(const uint8_t* mask, int64_t from, int64_t slots) {
  uint64_t eight;
  for (; from + 8 <= slots; from += 8) {
    std::memcpy(&eight, mask + from, 8);
    if (eight) break;
  }
  while (from < slots && !mask[from]) from++;
  return from;
}

inline Visible visible_by(const uint8_t* mask, int64_t slots) {
  const int64_t begin = first_visible(mask, 0, slots);
  if (begin == slots) return {0, 0, nullptr};
  const void* hidden = std::memchr(mask + begin, 0, slots - begin);
  const int64_t end = hidden ? static_cast<const uint8_t*>(hidden) - mask : slots;
  return first_visible(mask, end, slots) == slots ? Visible{begin, end, nullptr} : Visible{begin, slots, mask};
}

struct Prompt {
  const void* queries;  // of the same elements as keys, values and out
  int64_t of_row, of_head, of_token;  // strides of the queries
  Slots keys, values;
  int64_t rows, heads, each, tokens, width, out_width;  // each: heads of queries that read one head of keys
  float scale;
  const Visible* visible;  // [rows or 1, tokens]
  int64_t visible_of_row;  // its stride
  void* out;  // [rows, tokens, heads * each, out_width]

  const Visible& visible_to(int64_t row, int64_t token) const { return visible[row * visible_of_row + token]; }
};

// `count` queries of a head from `first` on. Those of one token follow one another.
template <int vectors>
struct PromptLanes {
  const Prompt& prompt;
  int64_t row, head, first, count;
  QueryLanes<vectors> queries;

  PromptLanes(const Prompt& prompt, int64_t row, int64_t head, int64_t first, int64_t count)
      : prompt(prompt), row(row), head(head), first(first), count(count), queries(prompt.width, prompt.out_width) {
    with_element(prompt.keys.type, [&](auto element) {
      const auto* from = static_cast<const decltype(element)*>(prompt.queries) + row * prompt.of_row;
      for_each_lane([&](int64_t lane, int64_t token, int64_t query) {
        queries.set(lane, from + token * prompt.of_token + (head * prompt.each + query) * prompt.of_head, prompt.scale);
      });
    });
  }

  // function(lane, its token, which query of the token it is)
  template <class Function>
  void for_each_lane(const Function& function) const {
    int64_t token = first / prompt.each, query = first % prompt.each;
    for (int64_t lane = 0; lane < count; lane++) {
      function(lane, token, query);
      if (++query == prompt.each) token++, query = 0;
    }
  }

  void read() {
    const int64_t token = first / prompt.each, end = (first + count - 1) / prompt.each + 1;
    Visible any{prompt.keys.count, 0, nullptr}, all{0, prompt.keys.count, nullptr};  // by any of the tokens, by all
    for (int64_t one = token; one < end; one++) {
      const Visible& visible = prompt.visible_to(row, one);
      any = {std::min(any.begin, visible.begin), std::max(any.end, visible.end), nullptr};
      all = {std::max(all.begin, visible.begin), std::min(all.end, visible.end), visible.mask ? visible.mask : all.mask};
    }
    FloatSlots of_keys, of_values;
    for (int64_t begin = any.begin; begin < any.end; begin += block) {
      const int64_t slots = std::min(block, any.end - begin);
      queries.score(of_keys.of(prompt.keys, row, head, begin, slots));
      if (all.mask || begin < all.begin || begin + slots > all.end)
        for (int64_t one = token; one < end; one++) hide(one, begin, begin + slots);
      queries.add(of_values.of(prompt.values, row, head, begin, slots));
    }
  }

  // Lowers the scores of slots that a token does not see.
  void hide(int64_t token, int64_t begin, int64_t end) {
    const int64_t from = std::max<int64_t>(0, token * prompt.each - first);
    const int64_t to = std::min(count, (token + 1) * prompt.each - first);
    const Visible& visible = prompt.visible_to(row, token);
    const auto lower = [&](int64_t slot) {
      float* scores = queries.scores + (slot - begin) * queries.size;
      for (int64_t lane = from; lane < to; lane++) scores[lane] = unseen;
    };
    for (int64_t slot = begin; slot < std::min(visible.begin, end); slot++) lower(slot);
    for (int64_t slot = std::max(visible.end, begin); slot < end; slot++) lower(slot);
    for (int64_t slot = begin; visible.mask && slot < end; slot++)
      if (!visible.mask[slot]) lower(slot);
  }

  void write() const {
    const int64_t width = prompt.out_width, of_token = prompt.heads * prompt.each * width;
    const int64_t begin = row * prompt.tokens * of_token + head * prompt.each * width;
    with_element(prompt.keys.type, [&](auto element) {
      auto* to = static_cast<decltype(element)*>(prompt.out) + begin;
      for_each_lane([&](int64_t lane, int64_t token, int64_t query) {
        const float total = queries.total[lane];
        const float factor = total == 0 ? 0 : 1 / total;  // 0 where the token sees no slot
        queries.get(lane, factor, to + token * of_token + query * width);
      });
    });
  }
};

template <int vectors>
void read_prompt(const Prompt& prompt, int64_t row, int64_t head, int64_t first, int64_t count) {
  PromptLanes<vectors> part(prompt, row, head, first, count);
  part.read();
  part.write();
}

inline void read_prompt(const Prompt& prompt) {
  const int64_t queries = prompt.tokens * prompt.each, heads = prompt.rows * prompt.heads;
  const auto groups_of = [&](int64_t size) { return (queries + size - 1) / size; };
  int64_t size = most_vectors * lanes;
  while (size > lanes && heads * groups_of(size) < torch::stable::get_num_threads()) size -= lanes;
  const int64_t groups = groups_of(size);
  const auto read = [&](int64_t task) {
    const int64_t number = groups - 1 - task % groups;  // the last tokens see most: they come first
    const int64_t head = task / groups % prompt.heads, row = task / groups / prompt.heads;
    const int64_t first = number * size, count = std::min(size, queries - first);
    if (count <= lanes) read_prompt<1>(prompt, row, head, first, count);
    else if (count <= 2 * lanes) read_prompt<2>(prompt, row, head, first, count);
    else read_prompt<most_vectors>(prompt, row, head, first, count);
  };
  in_parallel(heads * groups, read, 32);
}

}  // namespace
