// Counts the bytes that a program has allocated, and their peak: put before the C library's functions by LD_PRELOAD.
// Sizes are those asked for, rounded up by the allocator. Linux with glibc.

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

static std::atomic<int64_t> allocated{0}, peak{0};

static void* counted(void* memory) {
  if (memory == nullptr) return memory;
  const int64_t size = malloc_usable_size(memory), now = allocated.fetch_add(size, std::memory_order_relaxed) + size;
  int64_t most = peak.load(std::memory_order_relaxed);
  while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
  return memory;
}

static void forget(void* memory) {
  if (memory != nullptr) allocated.fetch_sub(malloc_usable_size(memory), std::memory_order_relaxed);
}

void* malloc(size_t size) { return counted(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void* memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** memory, size_t alignment, size_t size) {
  void* got = memalign(alignment, size);
  if (got == nullptr) return ENOMEM;
  *memory = got;
  return 0;
}

void* realloc(void* memory, size_t size) {
  const int64_t before = memory == nullptr ? 0 : malloc_usable_size(memory);
  void* got = __libc_realloc(memory, size);
  if (got == nullptr && size > 0) return got;
  allocated.fetch_sub(before, std::memory_order_relaxed);
  return counted(got);
}

void free(void* memory) {
  forget(memory);
  __libc_free(memory);
}

int64_t allocated_bytes() { return allocated.load(); }
int64_t peak_bytes() { return peak.load(); }
void forget_peak() { peak.store(allocated.load()); }
}
