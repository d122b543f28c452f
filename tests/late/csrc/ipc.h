// Memory and events that two processes share, as with CUDA's IPC: memory by the file that it lies in. And words of the
// host's memory that streams of both write and wait for, as with cuStreamWriteValue32 and cuStreamWaitValue32.
#pragma once

#include "device.h"

namespace late {

inline std::string region_name() {
  check_usable();
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(own_file);
}

inline Region import_region(const std::string& name) {
  if (name == region_name()) return own;
  Lock lock(imported_mutex);
  auto known = imported.find(name);
  if (known == imported.end()) {
    int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(file >= 0, "late: ", name, ": ", std::strerror(errno));
    known = imported.emplace(name, map_region(file, ::lseek(file, 0, SEEK_END))).first;
    ::close(file);
  }
  return known->second;
}

// Where a storage lies in its region. Its memory is kept until unshare() of the same place.
inline size_t share(const c10::Storage& s) {
  Block* block = Allocator::block_of(s.data_ptr());
  TORCH_CHECK(block, "late: this memory cannot be shared");
  return allocator.share(block);
}

// Memory of another process, as bytes. To let it go waits for the current stream, as CUDA does.
inline Tensor import_bytes(const std::string& name, size_t place, size_t bytes, int device) {
  char* address = import_region(name).device + place;
  c10::DataPtr p(address, address, [](void*) { synchronize(current()); }, {kDevice, c10::DeviceIndex(device)});
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(p), &allocator, false);
  Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kKey), caffe2::TypeMeta::Make<uint8_t>());
  t.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(bytes)});
  return t;
}

// An event that other processes may wait for: a place in the header of the process that made it.
struct IpcEvent {
  std::string region;
  int64_t place;

  static IpcEvent make() {
    auto region = region_name();
    auto place = header->next_event++;
    TORCH_CHECK(size_t(place) < kEvents, "late: more than ", kEvents, " interprocess events");
    return {region, place};
  }
  Shared* shared() const { return reinterpret_cast<Shared*>(import_region(region).tasks); }
  void record(Stream* s) const { shared()->events[place] = uint64_t(s->slot) << 48 | uint64_t(last_queued(s)); }
  bool query() const { return passed(shared(), shared()->events[place]); }
  // For what is recorded now. If that process is killed before it gets there, the stream waits for ever.
  void wait(Stream* s) const {
    push(s, [in = shared(), recorded = shared()->events[place].load()] {
      while (!passed(in, recorded)) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  }

 private:
  static bool passed(const Shared* in, uint64_t recorded) {
    return in->done[recorded >> 48] >= int64_t(recorded & ((1ull << 48) - 1));
  }
};

// Registered memory of the host, by its address on the device, which differs from that of the host.
constexpr uint64_t kOnDevice = uint64_t(1) << 60;
inline std::map<uint64_t, size_t>& registered_words = *new std::map<uint64_t, size_t>;

inline uint64_t register_words(uint64_t address, size_t bytes) {
  check_usable();
  Lock lock(imported_mutex);
  registered_words[address | kOnDevice] = bytes;
  return address | kOnDevice;
}

inline std::atomic<uint32_t>* word(uint64_t address) {
  Lock lock(imported_mutex);
  auto after = registered_words.upper_bound(address);
  TORCH_CHECK(
      after != registered_words.begin() && address + 4 <= std::prev(after)->first + std::prev(after)->second && address % 4 == 0,
      "late: no word of registered memory at ", address);
  return reinterpret_cast<std::atomic<uint32_t>*>(address & ~kOnDevice);
}

inline void write_value(Stream* s, uint64_t address, uint32_t value) {
  push(s, [at = word(address), value] { at->store(value); });
}

// Until the word is at or behind the value, in cyclic order.
inline void wait_value(Stream* s, uint64_t address, uint32_t value) {
  push(s, [at = word(address), value] {
    while (int32_t(at->load() - value) < 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
}

}  // namespace late
