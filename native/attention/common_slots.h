// Attention to the slots that rows of one prompt share.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "in_parallel.h"
#include "query_lanes.h"
#include "work.h"

namespace {

constexpr int64_t most_groups = 4;  // groups of queries that read a block of keys one after another

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

  // mask_at: the first of the slots in the mask.
  void read(const HeadSlots<float>& keys, const HeadSlots<float>& values, int64_t mask_at) {
    queries.score(keys);
    if (work.mask)
      for (int64_t one = 0; one < count; one++)
        for (int64_t i = 0; i < keys.count; i++)
          queries.scores[i * queries.size + one] += work.added(row_of(one), head, query_of(one), mask_at + i);
    queries.add(values);
  }

  void write(Work& to, int64_t share) const {
    for (int64_t one = 0; one < count; one++) {
      const int64_t at = to.common_at(part, share, row_of(one), head, query_of(one));
      to.softmax[at] = {queries.most[one], queries.total[one]};
      queries.get(one, 1, &to.sums[at * to.out_width]);
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
  FloatSlots of_keys, of_values;
  int64_t from = part.common_slots * task.share / part.shares, to = part.common_slots * (task.share + 1) / part.shares;
  for (const Segment& segment : part.common) {
    const int64_t last = std::min(segment.keys.count, to);
    for (int64_t begin = std::max<int64_t>(0, from); begin < last; begin += block) {
      const int64_t slots = std::min(block, last - begin);
      const HeadSlots<float> keys = of_keys.of(segment.keys, task.prompt, task.head, begin, slots);
      const HeadSlots<float> values = of_values.of(segment.values, task.prompt, task.head, begin, slots);
      for (auto& group : groups) group.read(keys, values, segment.begin + begin);
    }
    from -= segment.keys.count, to -= segment.keys.count;
  }
  for (const auto& group : groups) group.write(work, task.share);
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

// What the queries of rows that share slots find there: into the sums of `work`.
void read_common_slots(Work& work) {
  const std::vector<Task> tasks = tasks_of(work);
  in_parallel(tasks.size(), [&](int64_t number) {
    const Task& task = tasks[number];
    const int64_t vectors = (task.end - task.first + lanes - 1) / lanes, rest = vectors % most_vectors;
    const int64_t last = rest ? task.first + (vectors - rest) * lanes : task.end;  // a smaller group
    if (last > task.first) read_common<most_vectors>(work, task, task.first, last);
    if (rest == 1) read_common<1>(work, task, last, task.end);
    if (rest == 2) read_common<2>(work, task, last, task.end);
  });
}

}  // namespace
