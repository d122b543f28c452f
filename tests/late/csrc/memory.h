// Memory: a file that is mapped twice. Tensors carry addresses of the one mapping, which nobody can read; tasks use the
// other. And a caching allocator, which hands a freed block out again at once, in the order of its stream.
#pragma once

#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace late {

// The memory of this process, or of another one that was imported.
struct Region {
  char *device = nullptr, *tasks = nullptr;
  size_t bytes = 0;
  bool has(const void* p) const { return p >= device && p < device + bytes; }
};
inline Region own;
inline int own_file = -1;
constexpr size_t kCommunicatorBytes = size_t(2) << 30;
inline std::map<std::string, Region>& imported = *new std::map<std::string, Region>;  // by the file's name
inline std::mutex imported_mutex;

// Where tasks find it.
inline void* for_tasks(const void* p) {
  if (!p) return nullptr;
  auto in = [p](const Region& r) { return r.tasks + (static_cast<const char*>(p) - r.device); };
  if (own.has(p)) return in(own);
  Lock lock(imported_mutex);
  for (auto& [name, region] : imported)
    if (region.has(p)) return in(region);
  TORCH_CHECK(false, "late: ", p, " is no address of this device");
}

inline Region map_region(int file, size_t bytes) {
  auto map = [&](int protection) {
    void* p = ::mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(p != MAP_FAILED, "late: mmap: ", std::strerror(errno));
    ::madvise(p, bytes, MADV_DONTFORK);
    return static_cast<char*>(p);
  };
  return {map(PROT_NONE), map(PROT_READ | PROT_WRITE), bytes};
}

inline void initialize() {
  static std::mutex mutex;
  Lock lock(mutex);
  if (state.initialized) return;
  const char* gib = std::getenv("LATE_GIB");
  const size_t bytes = size_t(gib ? std::atoi(gib) : 16) << 30;  // of addresses: pages that nobody has touched cost nothing
  own_file = ::memfd_create("late", MFD_CLOEXEC);
  TORCH_CHECK(own_file >= 0 && ::ftruncate(own_file, off_t(bytes)) == 0, "late: memfd: ", std::strerror(errno));
  own = map_region(own_file, bytes);
  header = reinterpret_cast<Shared*>(own.tasks);
  ::pthread_atfork(nullptr, nullptr, [] { state.bad_fork = true; });
  state.initialized = true;
}

inline thread_local int current_device = 0;
inline thread_local int capture_mode = 0;  // as CUstreamCaptureMode: 0 is global, 1 thread-local
inline thread_local std::map<int, int> current_streams;  // by device

// The stack of Python, if this thread runs Python, and otherwise its name.
inline std::string caller() {
  // A thread of Python's may have released the GIL for this call; it holds no lock here that others may wait for.
  if (Py_IsInitialized() && PyGILState_GetThisThreadState()) {
    py::gil_scoped_acquire gil;
    py::error_scope pending;  // this may run in a destructor, while an exception is raised
    try {
      py::list stack = py::module_::import("traceback").attr("format_stack")();
      return py::str("").attr("join")(stack).cast<std::string>();
    } catch (const std::exception&) {
    }
  }
  char name[16] = "";
  ::pthread_getname_np(::pthread_self(), name, sizeof(name));
  return std::string("thread ") + name;
}

// A call that needs a context of this device. The first one makes it: hundreds of MB of a GPU's memory.
inline void need_context(int device) {
  if (device < 0 || state.contexts[device].exchange(true)) return;
  auto by = caller();
  Lock lock(state.mutex);
  state.made_by[device] = std::move(by);
}

// As PyTorch's cudaSetDevice, which makes the context of a device that was not current before. On the return from a
// guard PyTorch calls it only for a device that has one: see Guard::uncheckedSetDevice.
inline void set_device(int device) {
  if (device == current_device) return;
  need_context(device);
  current_device = device;
}

inline Stream* current(int device = -1) {
  if (device < 0) device = current_device;
  return get_stream(device, current_streams[device]);
}

struct Block {
  char* address;
  size_t bytes;
  Stream* stream;              // that it was allocated on
  std::set<Stream*> recorded;  // by record_stream
  std::vector<std::pair<Stream*, int64_t>> until{};  // freed: what these still have to do
  size_t asked = 0;
  int shared = 0;      // with other processes: then it is not used again before these are said to be through
  bool limbo = false;  // freed while it was shared
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    check_usable();
    c10::Device device(kDevice, c10::DeviceIndex(current_device));
    need_context(current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    Stream* stream = current();
    size_t size = 512;
    while (size < bytes) size *= 2;
    Lock lock(mutex_);
    reap();
    auto& free = free_[{stream, size}];
    Block* block;
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK_WITH(
          OutOfMemoryError, used_ + size <= own.bytes && !state.full[current_device], "late: out of memory on ", device);
      block = new Block{own.device + used_, size, stream};
      used_ += size;
      stats_.reserved_bytes[0].increase(size);
    }
    fill_with_nan(block);
    block->asked = bytes;
    stats_.allocated_bytes[0].increase(bytes);
    return {block->address, block, &release, device};
  }

  static void release(void* block);
  static Block* block_of(const c10::DataPtr& p) {
    return p.get_deleter() == &release ? static_cast<Block*>(p.get_context()) : nullptr;
  }

  void free(Block* block) {
    Lock lock(mutex_);
    if (block->shared)
      block->limbo = true;
    else
      give_back(block);
  }

  // With other processes, until unshare() for the same place.
  size_t share(Block* block) {
    Lock lock(mutex_);
    block->shared++;
    size_t place = block->address - own.device;
    shared_[place] = block;
    return place;
  }
  void unshare(size_t place) {
    Lock lock(mutex_);
    Block* block = shared_.at(place);
    if (--block->shared > 0) return;
    shared_.erase(place);
    if (block->limbo) {
      block->limbo = false;
      give_back(block);
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    push(current(), [to = for_tasks(to), from = for_tasks(from), bytes] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return state.initialized; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    Block* block = block_of(p);
    if (!block) return;
    Stream* stream = get_stream(s.device_index(), int(s.id()));
    Lock lock(mutex_);
    if (stream != block->stream) block->recorded.insert(stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats_; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { stats_.allocated_bytes[0].reset_peak(); }

 private:
  // When a block is handed out, not when it is freed: a free is the host's bookkeeping, as with CUDA, and writes nothing.
  // Another stream may still read a freed block without record_stream, if the block's stream waits for it before the
  // next allocation. FSDP2 frees gradients in this way.
  static void fill_with_nan(Block* block) {
    if (state.poison) push(block->stream, [p = for_tasks(block->address), n = block->bytes] { std::memset(p, 0xFF, n); });
  }

  // Usable at once in the order of its stream, or when the recorded ones are through. The mutex is held.
  void give_back(Block* block) {
    stats_.allocated_bytes[0].decrease(block->asked);
    if (block->recorded.empty()) {
      free_[{block->stream, block->bytes}].push_back(block);
      return;
    }
    for (auto* stream : block->recorded) block->until.emplace_back(stream, last_queued(stream));
    block->recorded.clear();
    pending_.push_back(block);
  }
  void reap() {
    std::vector<Block*> ready, pending;
    {
      Lock lock(state.mutex);
      for (auto* block : pending_) {
        bool over = true;
        for (auto& [stream, number] : block->until) over &= stream->done >= number;
        (over ? ready : pending).push_back(block);
      }
    }
    pending_ = pending;
    for (auto* block : ready) {
      block->until.clear();
      free_[{block->stream, block->bytes}].push_back(block);
    }
  }

  std::mutex mutex_;
  size_t used_ = kHeaderBytes;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
  std::map<size_t, Block*> shared_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};
inline Allocator& allocator = *new Allocator;

inline void Allocator::release(void* block) {
  if (block && !state.bad_fork) allocator.free(static_cast<Block*>(block));
}

// Page-locked memory of the host is known by its address: only from it a copy reads late.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* p = nullptr;
    if (bytes) {
      // CUDA allocates it in the context of any device, and makes one if there is none.
      bool any = std::any_of(state.contexts, state.contexts + kMostDevices, [](auto& made) { return made.load(); });
      if (!any) need_context(current_device);
      TORCH_CHECK(::posix_memalign(&p, 64, bytes) == 0, "late: no memory for the host");
      Lock lock(mutex_);
      blocks_[static_cast<char*>(p)] = bytes;
    }
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* p);
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool has(const void* p) {
    Lock lock(mutex_);
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    return after != blocks_.begin() && p < (--after)->first + after->second;
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> blocks_;
};
inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;

inline void PinnedAllocator::release(void* p) {
  if (!p) return;
  {
    Lock lock(pinned_allocator.mutex_);
    pinned_allocator.blocks_.erase(static_cast<char*>(p));
  }
  ::free(p);
}

}  // namespace late
