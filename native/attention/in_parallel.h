// Tasks of several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

// Threads take tasks in turn: the one that memory or other processes delay takes fewer of them. shares: how often each
// would do so if they were equally fast.
template <class Function>
void in_parallel(int64_t tasks, const Function& function, int64_t shares = 8) {
  const int64_t threads = torch::stable::get_num_threads(), share = std::max<int64_t>(1, tasks / (shares * threads));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, tasks), 1, [&](int64_t, int64_t) {
    for (int64_t from; (from = next.fetch_add(share, std::memory_order_relaxed)) < tasks;)
      for (int64_t task = from; task < std::min(from + share, tasks); task++) function(task);
  });
}

}  // namespace
