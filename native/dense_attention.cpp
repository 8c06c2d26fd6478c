// Attention over keys and values of float32, bfloat16 or float16: of one token for each of many rows, and of several
// tokens. Sums are float32.

#include <torch/csrc/stable/library.h>  // the stable interface compiles in seconds
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "attention/common_slots.h"
#include "attention/in_parallel.h"
#include "attention/own_slots.h"
#include "attention/prompt.h"
#include "attention/slots.h"
#include "attention/work.h"
#include "handles.h"

namespace {

constexpr auto Bool = torch::headeronly::ScalarType::Bool;

// The rows of a cache. layout: their number, and how many segments they have. Those are read in this order.
Part part_of(int64_t first, const int64_t* layout, const Slots* keys, const Slots* values, int64_t mask_slots) {
  Part part{first, layout[0], keys[0].rows};
  int64_t slots = 0;
  for (int64_t i = 0; i < layout[1]; i++) slots += keys[i].count;
  STD_TORCH_CHECK(mask_slots < 0 || slots <= mask_slots, "a mask of ", mask_slots, " slots for ", slots);
  for (int64_t i = 0, begin = mask_slots - slots; i < layout[1]; i++) {
    const Segment segment{keys[i], values[i], begin};
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

void check_fit(const Work& work, int64_t rows, std::span<const Slots> keys, std::span<const Slots> values,
               const std::optional<Tensor>& mask) {
  STD_TORCH_CHECK(rows == work.rows, "queries of ", work.rows, " rows for caches of ", rows);
  for (const Slots& of : keys)
    STD_TORCH_CHECK(of.heads == work.heads && of.width == work.width, "keys that do not fit the queries");
  for (const Slots& of : values)
    STD_TORCH_CHECK(of.heads == work.heads && of.width == work.out_width, "values that do not fit the queries");
  const int64_t sizes[] = {work.rows, work.heads, work.each};
  for (int64_t axis = 0; mask && axis < 3; axis++)
    STD_TORCH_CHECK(mask->size(axis) == 1 || mask->size(axis) == sizes[axis], "a mask that does not fit the queries");
}

void check_segments(Borrowed queries, std::span<const Slots> keys, std::span<const Slots> values,
                    const std::vector<int64_t>& parts, const std::optional<Tensor>& mask) {
  size_t segments = 0;
  bool are_counts = parts.size() % 2 == 0 && !parts.empty();
  for (size_t i = 1; are_counts && i < parts.size(); i += 2) are_counts = parts[i] > 0, segments += parts[i];
  STD_TORCH_CHECK(are_counts && segments == keys.size() && segments == values.size(), keys.size(),
                  " segments of keys and ", values.size(), " of values, which are not those of the caches");
  const auto is_other = [type = type_of(queries)](const Slots& of) { return of.type != type; };
  STD_TORCH_CHECK(std::none_of(keys.begin(), keys.end(), is_other) &&
                    std::none_of(values.begin(), values.end(), is_other),
                  other_types);
  STD_TORCH_CHECK(!mask || Borrowed(*mask).is_float(), "a mask of another data type than float32");
}

// Copies the rows of `from` [rows, heads, 1, width] that begin at `first` to the last slots of an open segment.
template <class Element>
void copy_last(Borrowed from, int64_t first, const Slots& to) {
  int64_t out_of[4];  // asking a tensor takes longer than copying a number
  for (int64_t axis = 0; axis < 4; axis++) out_of[axis] = from.stride(axis);
  const Element* source = from.values<Element>() + first * out_of[0];
  Element* target = const_cast<Element*>(to.of<Element>(0, 0, to.count - 1, 1).data);
  for (int64_t row = 0; row < to.rows; row++)
    for (int64_t head = 0; head < to.heads; head++)
      for (int64_t i = 0; i < to.width; i++)
        target[row * to.of_row + head * to.of_head + i] = source[row * out_of[0] + head * out_of[1] + i * out_of[3]];
}

void append(const Work& work, Borrowed key, Borrowed value, std::span<const Slots> keys,
            std::span<const Slots> values) {
  for (const auto& [added, width] : {std::pair(key, work.width), std::pair(value, work.out_width)})
    STD_TORCH_CHECK(added.size(0) == work.rows && added.size(1) == work.heads && added.size(2) == 1 &&
                      added.size(3) == width && type_of(added) == keys[0].type,
                    "new keys or values of ", added.size(0), " rows, ", added.size(1), " heads of size ", added.size(3),
                    " in caches of ", work.rows, " rows, ", work.heads, " heads of size ", width,
                    ", or of another data type");
  std::vector<size_t> last;
  for (const Part& part : work.parts) {
    last.push_back((last.empty() ? -1 : last.back()) + part.common.size() + part.own.size());
    STD_TORCH_CHECK(keys[last.back()].rows == part.rows && keys[last.back()].count > 0,
                    "a cache of ", part.rows, " rows without a slot for the new token of each");
  }
  with_element(keys[0].type, [&](auto element) {
    for (size_t i = 0; i < last.size(); i++)
      for (const auto& [from, to] : {std::pair(key, keys[last[i]]), std::pair(value, values[last[i]])})
        copy_last<decltype(element)>(from, work.parts[i].first, to);
  });
}

// The queries, times `scale`.
std::vector<float> scaled(Borrowed queries, float scale) {
  int64_t sizes[4], strides[4];
  for (int64_t axis = 0; axis < 4; axis++) sizes[axis] = queries.size(axis), strides[axis] = queries.stride(axis);
  std::vector<float> found(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
  float* to = found.data();
  with_element(type_of(queries), [&](auto element) {
    const auto* data = queries.values<decltype(element)>();
    for (int64_t row = 0; row < sizes[0]; row++)
      for (int64_t head = 0; head < sizes[1]; head++)
        for (int64_t query = 0; query < sizes[2]; query++) {
          const auto* from = data + row * strides[0] + head * strides[1] + query * strides[2];
          for (int64_t i = 0; i < sizes[3]; i++) *to++ = as_float(from[i * strides[3]]) * scale;
        }
  });
  return found;
}

// queries: [rows, heads, tokens, width]; as many consecutive heads read each KV head. scale: of their products with
// keys. parts: for each cache, whose rows follow one another, the number of its rows and of its segments. keys, values:
// of each segment, [rows or prompts of its cache, KV heads, slots, width]; as many consecutive rows share those of each
// prompt, which come first. mask: added to the scores, [rows, KV heads, queries per KV head, slots] or 1 where it is the
// same for all, the last slots of each row. All widths are multiples of 8. new_key, new_value: see `layer_attention`;
// null for none. Returns [rows, heads, tokens, width of a value]; by_token: of one token, [rows, 1, heads, ...].
Tensor attend(Borrowed queries, std::span<const Slots> keys, std::span<const Slots> values,
              const std::vector<int64_t>& parts, const std::optional<Tensor>& mask, double scale,
              const Borrowed* new_key = nullptr, const Borrowed* new_value = nullptr, bool by_token = false) {
  check_segments(queries, keys, values, parts, mask);
  const int64_t heads = keys[0].heads, asked = queries.size(1) * queries.size(2);
  STD_TORCH_CHECK(asked % heads == 0, asked, " queries of a row for ", heads, " heads");
  const std::vector<float> of_queries = scaled(queries, scale);
  Work work{of_queries.data(), nullptr, queries.size(0), heads, asked / heads, queries.size(3), values[0].width};
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
  read_common_slots(work);
  const int64_t of_heads = queries.size(1), tokens = queries.size(2);
  const Tensor out = empty_of(queries.type(), {work.rows, by_token ? tokens : of_heads, by_token ? of_heads : tokens,
                                               work.out_width});
  with_element(type_of(queries), [&](auto element) {
    auto* to = Borrowed(out).values<decltype(element)>();
    if constexpr (std::is_same_v<decltype(element), float>) {
      read_rows(work, part_of_row, to);
    } else {
      const int64_t count = work.rows * asked * work.out_width;
      const std::unique_ptr<float[]> wide(new float[count]);
      read_rows(work, part_of_row, wide.get());
      round_each(wide.get(), count, to);
    }
  });
  return out;
}

Tensor dense_attention(Tensor queries, std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<int64_t> parts,
                       std::optional<Tensor> mask, double scale) {
  const std::vector<Slots> of_keys(keys.begin(), keys.end()), of_values(values.begin(), values.end());
  return attend(queries, of_keys, of_values, parts, mask, scale);
}

// Attention of several tokens per row. query: [rows, heads, tokens, width]. key, value: [rows, KV heads, slots, width],
// of as many consecutive heads each. mask: bool [rows or 1, 1, tokens, slots], whether a token sees a slot; without one,
// token i sees i + 1 slots. out: [rows, tokens, heads, width of a value], contiguous, for what the tokens find; zeros
// where a token sees no slot.
void prompt_attention(Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask, double scale, Tensor out) {
  const int64_t rows = query.size(0), heads = key.size(1), tokens = query.size(2), slots = key.size(2);
  for (const Tensor& one : {query, key, value, out}) {
    STD_TORCH_CHECK(type_of(one) != Type::none && type_of(one) == type_of(query), other_types);
    STD_TORCH_CHECK(one.stride(3) == 1, "not contiguous vectors");
  }
  STD_TORCH_CHECK(heads > 0 && query.size(1) % heads == 0 && key.size(0) == rows && key.size(3) == query.size(3) &&
                    value.size(0) == rows && value.size(1) == heads && value.size(2) == slots,
                  "keys and values that do not fit the queries");
  STD_TORCH_CHECK(out.is_contiguous() && out.size(0) == rows && out.size(1) == tokens &&
                    out.size(2) == query.size(1) && out.size(3) == value.size(3),
                  "an output that does not fit the queries");
  const int64_t mask_rows = mask ? mask->size(0) : 1;
  STD_TORCH_CHECK(!mask || (mask->scalar_type() == Bool && mask->stride(3) == 1 && mask->size(1) == 1 &&
                            mask->size(2) == tokens && mask->size(3) == slots && (mask_rows == rows || mask_rows == 1)),
                  "a mask that does not fit the queries");
  std::vector<Visible> visible(mask_rows * tokens);
  if (mask) {
    const uint8_t* of_mask = static_cast<const uint8_t*>(mask->const_data_ptr());
    const int64_t of_row = mask->stride(0), of_token = mask->stride(2);
    in_parallel(mask_rows * tokens, [&](int64_t token) {
      visible[token] = visible_by(of_mask + token / tokens * of_row + token % tokens * of_token, slots);
    });
  } else {
    for (int64_t token = 0; token < tokens; token++) visible[token] = {0, std::min(token + 1, slots), nullptr};
  }
  read_prompt({query.const_data_ptr(), query.stride(0), query.stride(1), query.stride(2),
               Slots(key), Slots(value), rows, heads, query.size(1) / heads, tokens, query.size(3), value.size(3),
               static_cast<float>(scale), visible.data(), mask_rows > 1 ? tokens : 0,
               out.mutable_data_ptr()});
}

// What the layers of a step attend to, from `open_layers` to `close_layers` in the same thread. Its caller keeps the
// tensors.
struct OpenStep {
  std::vector<Slots> keys, values;  // of one layer after the other
  std::vector<double> scales;  // of each layer
  std::vector<int64_t> parts;  // of every layer
  std::optional<Tensor> mask;
  size_t next = 0;  // layer

  size_t segments() const { return keys.size() / scales.size(); }
  std::span<const Slots> of(const std::vector<Slots>& slots, size_t layer) const {
    return {&slots[layer * segments()], segments()};
  }
};
thread_local OpenStep open_step;

void close_layers() { open_step = {}; }

bool can_be_read(const Tensor& one) {
  return one.dim() == 4 && type_of(one) != Type::none && one.is_cpu() && one.size(3) % 8 == 0 && one.stride(3) == 1;
}

// The slots of the longest cache.
int64_t most_slots(std::span<const Slots> segments, const std::vector<int64_t>& parts) {
  int64_t most = 0;
  for (size_t i = 1, segment = 0; i < parts.size(); i += 2) {
    int64_t slots = 0;
    for (size_t end = segment + parts[i]; segment < end && segment < segments.size(); segment++)
      slots += segments[segment].count;
    most = std::max(most, slots);
  }
  return most;
}

// keys, values: the memory of one layer's segments after the other's. spans: of each segment the first slot and the one
// after its last. The last slots of the last segment of each cache are not written yet: `layer_attention` writes them.
// parts: of every layer, see `attend`. mask: of all slots of the longest cache. scales: one for each layer, NaN for
// width**-0.5. Returns whether `layer_attention` can attend to them; otherwise nothing is open.
bool open_layers(std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<int64_t> spans,
                 std::vector<int64_t> parts, std::optional<Tensor> mask, std::vector<double> scales) {
  close_layers();
  STD_TORCH_CHECK(!scales.empty() && values.size() == keys.size() && keys.size() % scales.size() == 0, keys.size(),
                  " segments of keys and ", values.size(), " of values, which are not those of ", scales.size(),
                  " layers");
  STD_TORCH_CHECK(spans.size() == 2 * keys.size(), "spans of ", spans.size() / 2, " segments");
  OpenStep step{{}, {}, std::move(scales), std::move(parts), std::move(mask)};
  step.keys.reserve(keys.size()), step.values.reserve(keys.size());
  for (size_t at = 0; at < keys.size(); at++) {
    if (!can_be_read(keys[at]) || !can_be_read(values[at])) return false;
    if (type_of(keys[at]) != type_of(keys[0]) || type_of(values[at]) != type_of(keys[0])) return false;
    step.keys.emplace_back(keys[at], spans[2 * at], spans[2 * at + 1]);
    step.values.emplace_back(values[at], spans[2 * at], spans[2 * at + 1]);
  }
  for (size_t layer = 0; layer < step.scales.size(); layer++) {
    const auto of_keys = step.of(step.keys, layer);
    if (std::isnan(step.scales[layer])) step.scales[layer] = 1 / std::sqrt(double(of_keys[0].width));
    if (!step.mask) continue;
    const Tensor& of = *step.mask;
    const bool fits = of.dim() == 4 && of.size(1) == 1 && of.size(2) == 1;
    if (!fits || of.size(3) != most_slots(of_keys, step.parts)) return false;
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
Tensor layer_attention_of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value) {
  OpenStep& open = open_step;
  if (open.scales.empty()) return layer_attention_in_python(shared(query), shared(key), shared(value));
  STD_TORCH_CHECK(open.next < open.scales.size(), "all of ", open.scales.size(), " open layers are computed already");
  const size_t layer = open.next++;
  const Borrowed asked = query, new_key = key, new_value = value;
  STD_TORCH_CHECK(asked.size(2) == 1, asked.size(2), " tokens of a row in an open layer");
  return attend(asked, open.of(open.keys, layer), open.of(open.values, layer), open.parts, open.mask,
                open.scales[layer], &new_key, &new_value, true);
}

Tensor layer_attention(Tensor query, Tensor key, Tensor value) {
  return layer_attention_of(query.get(), key.get(), value.get());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvengine, library) {
  library.def("close_layers() -> ()");
  library.def(
    "dense_attention(Tensor queries, Tensor[] keys, Tensor[] values, int[] parts, Tensor? mask, float scale)"
    " -> Tensor");
  library.def("layer_attention(Tensor query, Tensor key, Tensor value) -> Tensor");
  library.def(
    "prompt_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, Tensor(a!) out) -> ()");
  library.def(
    "open_layers(Tensor(a!)[] keys, Tensor(b!)[] values, int[] spans, int[] parts, Tensor? mask, float[] scales)"
    " -> bool");
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

extern "C" AOTITorchError aoti_torch_cpu_layer_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                         AtenTensorHandle value, AtenTensorHandle* out) {
  return hand_over(layer_attention_of(query, key, value), out);
}
