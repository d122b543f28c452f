// What PyTorch asks of a device: current devices and streams, events, random numbers, hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace late {

// Whatever CUDA makes a context for, of which device, makes one here (need_context). Calls that set a device and then set
// the thread's earlier one, as PyTorch's recording and destroying of an event, may make two. Which device a query of an
// event needs is not documented; here it is the thread's current one.

// Snapshots of a stream: what it had been given when the event was recorded.
struct Event {
  Stream* stream = nullptr;
  int64_t number = 0;
  std::shared_ptr<double> at_ms;  // with timing
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    if (d.index() >= 0) set_device(d.index());
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < state.devices, "late: invalid device ordinal ", int(d.index()));
    exchangeDevice(d);
  }
  // The end of a guard, which makes no context.
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(state.devices); }

  // Streams

  static int index(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream stream(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, c10::DeviceIndex(device)}, id);
  }
  static Stream* of(const c10::Stream& s) { return get_stream(s.device_index(), int(s.id())); }
  c10::Stream getStream(c10::Device d) const override { return stream(index(d), current_streams[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override { return from_pool(index(d), state.next_id, 1); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high_priority) const override {
    return high_priority ? from_pool(index(d), state.next_high_id, 101) : getNewStream(d);
  }
  // CUDA's pools have 32 streams and begin again.
  static c10::Stream from_pool(int device, std::map<int, int>& next, int first) {
    check_usable();
    need_context(device);
    Lock lock(state.mutex);
    int id = first + next[device]++ % 32;
    make_stream(device, id);
    return stream(device, id);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto& now = current_streams[s.device_index()];
    auto before = stream(s.device_index(), now);
    now = int(s.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return of(s); }
  bool queryStream(const c10::Stream& s) const override {
    Stream* stream = of(s);
    need_context(stream->device);
    Lock lock(state.mutex);
    return stream->done >= stream->queued;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    need_context(s.device_index());
    late::synchronize(of(s));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_usable();
    if (device >= 0) there_and_back(device);
    need_context(current_device);
    std::vector<Stream*> streams;
    {
      Lock lock(state.mutex);
      for (auto& [key, s] : state.streams)
        if (key.first == (device < 0 ? current_device : device)) streams.push_back(s);
    }
    for (auto* s : streams) late::synchronize(s);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { allocator.recordStream(p, s); }

  // Events

  static void there_and_back(int device) {
    need_context(device);
    if (device != current_device) need_context(current_device);
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (!event) return;
    there_and_back(device);
    delete static_cast<Event*>(event);
  }
  void record(void** place, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    there_and_back(s.device_index());
    if (!*place) *place = new Event;
    auto* event = static_cast<Event*>(*place);
    event->stream = of(s);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      event->at_ms = std::make_shared<double>(0);
      push(event->stream, [at = event->at_ms] {
        *at = std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
      });
    }
    event->number = last_queued(event->stream);
  }
  void block(void* e, const c10::Stream& s) const override {
    auto* event = static_cast<Event*>(e);
    if (event) there_and_back(s.device_index());
    if (event && event->stream) push(of(s), nullptr, event->stream, event->number);
  }
  bool queryEvent(void* e) const override {
    auto* event = static_cast<Event*>(e);
    if (!event || !event->stream) return true;
    need_context(current_device);
    if (state.capturing && capture_mode == 0) {
      state.invalidated = true;
      TORCH_CHECK(false, "late: operation not permitted when stream is capturing");
    }
    Lock lock(state.mutex);
    return event->stream->done >= event->number;
  }
  void synchronizeEvent(void* e) const override {
    auto* event = static_cast<Event*>(e);
    if (event) need_context(current_device);
    if (event && event->stream) host_wait(event->stream, event->number);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    auto *begin = static_cast<Event*>(a), *end = static_cast<Event*>(b);
    TORCH_CHECK(
        begin && end && begin->at_ms && end->at_ms && queryEvent(a) && queryEvent(b),
        "late: both events must be recorded with timing and finished");
    return *end->at_ms - *begin->at_ms;
  }
};

// Random numbers are drawn from a seed and an offset, which counts at the launch: the same under any schedule.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device) : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& t) override {
    auto* words = static_cast<const uint64_t*>(t.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(t.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return t.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> of_device = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; i++) made.push_back(at::make_generator<Generator>(c10::DeviceIndex(i)));
    return made;
  }();
  return of_device.at(device < 0 ? current_device : device);
}

// The CPU generator that a task draws from.
inline at::Generator for_launch(const std::optional<at::Generator>& given) {
  at::Generator g = given.has_value() && given->defined() ? *given : default_generator(-1);
  if (g.device().type() != kDevice) return g;
  Lock lock(g.mutex());
  uint64_t offset = g.get_offset();
  g.set_offset(offset + 1);
  return at::detail::createCPUGenerator(mixed(mixed(g.current_seed()) + offset));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex d) const override { return state.contexts[d]; }
  void init() const override { check_usable(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(state.devices); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto before = c10::DeviceIndex(current_device);
    set_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return c10::DeviceIndex(std::exchange(current_device, d));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? c10::DeviceIndex(current_device) : d);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, c10::DeviceIndex(current_device)}; }
  bool isPinnedPtr(const void* p) const override { return pinned_allocator.has(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override {
    auto made = allocator.allocate(bytes);
    if (size_t kept = std::min(bytes, s.nbytes())) allocator.copy_data(made.get(), s.data(), kept);
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    s.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
inline Hooks& hooks = *new Hooks;

}  // namespace late
