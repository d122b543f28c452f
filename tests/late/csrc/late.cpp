// "late": a test accelerator on PyTorch's PrivateUse1. Work runs on threads of the CPU, one for each stream, as late as a
// test wants. This unit is the device; the collective backend is the other one.
//
//     streams.h   tasks, and the schedule that says when they run      tensors.h   tensors and views of them
//     memory.h    two mappings of one file, caching allocator          shapes.h    which results an operator has
//     device.h    current devices and streams, events, hooks           launch.h    the kernel of nearly all operators
//     ipc.h       what processes share: memory, events, words          late.cpp    the other kernels, and Python's names
#include "ipc.h"
#include "launch.h"

namespace late {

void push_on(const c10::Stream& stream, std::function<void()> task) {
  push(Guard::of(stream), std::move(task));
}

std::shared_ptr<void> communicator_memory(const c10::Device& device) {
  auto& taken = state.communicators[device.index()];
  int most = state.most_communicators[device.index()];
  if (state.full[device.index()] || (most && taken >= most)) return nullptr;
  taken++;
  return std::shared_ptr<void>(&taken, [](void* p) { static_cast<std::atomic<int>*>(p)->fetch_sub(1); });
}
std::chrono::milliseconds abort_time() { return std::chrono::milliseconds(state.abort_ms); }
void connects(const char* algorithm) {
  auto by = caller();
  Lock lock(state.mutex);
  state.algorithms.emplace_back(algorithm, std::move(by));
}

namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Operators that cannot go through the one kernel

Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(type), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return empty_on_device(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(type));
}

Tensor as_strided(
    const Tensor& t, c10::SymIntArrayRef sym_sizes, c10::SymIntArrayRef sym_strides, std::optional<c10::SymInt> sym_offset) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(sym_sizes), strides = C10_AS_INTARRAYREF_SLOW(sym_strides);
  auto offset = sym_offset ? sym_offset->expect_int() : t.storage_offset();
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, t.itemsize(), offset);
  TORCH_CHECK(bytes <= t.storage().nbytes(), "late: as_strided needs ", bytes, " bytes of a storage of ", t.storage().nbytes());
  return view_of(t, sizes, strides, offset, t.dtype());
}

const Tensor& resize_(const Tensor& t, c10::SymIntArrayRef sym_sizes, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(sym_sizes);
  resize(t, sizes, c10::contiguous_strides(sizes));
  if (format) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}

Tensor& set_storage_at(
    Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sym_sizes, c10::SymIntArrayRef sym_strides) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(sym_sizes), strides = C10_AS_INTARRAYREF_SLOW(sym_strides);
  auto contiguous = c10::contiguous_strides(sizes);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(sizes, sizes.size() == strides.size() ? strides : at::IntArrayRef(contiguous));
  return t;
}
Tensor& set_storage(Tensor& t, at::Storage storage) {
  int64_t elements = int64_t(storage.nbytes() / t.itemsize());
  return set_storage_at(t, std::move(storage), 0, c10::SymIntArrayRef({c10::SymInt(elements)}), {});
}
Tensor& set_tensor(Tensor& t, const Tensor& from) {
  return set_storage_at(t, from.storage(), from.storage_offset(), from.sym_sizes(), from.sym_strides());
}

// Like CUDA's: a copy with other memory of the host than page-locked is staged, or the host waits for it.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::OptionalDeviceGuard guard(is_late(from) ? from.device() : to.device());
  const bool on_device = is_late(from) && is_late(to);
  Stream* stream = current();
  Stream* peer = on_device && from.device() != to.device() ? current(to.device().index()) : nullptr;
  if (peer) push(stream, nullptr, peer, last_queued(peer));
  const Tensor& host = is_late(to) ? from : to;
  const bool pinned = !on_device && pinned_allocator.has(host.storage().data());
  Tensor source = is_late(from) ? cpu_view(from) : non_blocking && !pinned ? from.clone() : from;
  Tensor target = is_late(to) ? cpu_view(to) : to;  // memory of the host is kept by the task
  int64_t number = push(stream, [source, target] {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  });
  if (peer) push(peer, nullptr, stream, number);
  if (!on_device && !(non_blocking && (pinned || is_late(to)))) host_wait(stream, number);
  return to;
}

c10::Scalar item(const Tensor& t) {
  Stream* stream = current(t.device().index());
  Tensor host(at::detail::empty_cpu({}, t.scalar_type()));
  int64_t number = push(stream, [view = cpu_view(t), host] {
    at::AutoDispatchBelowADInplaceOrView below;
    host.copy_(view.reshape({}));
  });
  host_wait(stream, number);
  return host.item();
}

void record_stream(Tensor& t, c10::Stream stream) {
  allocator.recordStream(t.storage().data_ptr(), stream);
}

// PrivateUse1 is sent to the fused one.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, at::kBool)};
  Tensor mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(at::mul(x, mask), p == 1 ? 0. : 1 / (1 - p)), mask};
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// PrivateUse1 is sent to the overridable convolutions, which the CPU does not have.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  launch(operator_named("aten::convolution"), stack);
}
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  auto weight = (*stack)[stack->size() - 8].toTensor();
  bool transposed = (*stack)[stack->size() - 4].toBool();
  auto groups = (*stack)[stack->size() - 2].toInt();
  c10::List<int64_t> bias;
  bias.push_back(transposed ? weight.size(1) * groups : weight.size(0));
  stack->insert(stack->end() - 7, IValue(bias));
  launch(operator_named("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
// A CPU view carries these bits. To resolve them before the copy would copy a tensor that has them, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
// There are no lists of casts: autocast changes nothing.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// Operators with a composite kernel and one of the CPU (add, layer_norm) get the CPU's, so that their numbers are the
// CPU's: a composite kernel goes before a fallback.
struct PreferCpu {
  torch::Library library{torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__};
  PreferCpu() {
    using Key = c10::DispatchKey;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      auto op = dispatcher.findOp(name);
      if (!op || op->hasKernelForDispatchKey(kKey) || !op->hasKernelForDispatchKey(Key::CPU)) continue;
      if (op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
          op->hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional))
        library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    }
  }
};
PreferCpu& prefer_cpu = *new PreferCpu;

struct Register {
  Register() {
    c10::SetAllocator(kDevice, &allocator, 1);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    if (const char* devices = std::getenv("LATE_DEVICES")) state.devices = std::min(kMostDevices, std::atoi(devices));
  }
} registered;

// Each stream of a device, or of all for -1; likewise the number of the stream.
template <class F>
void each_stream(int device, int id, F f) {
  Lock lock(state.mutex);
  for (auto& [key, s] : state.streams) {
    if ((device >= 0 && key.first != device) || (id >= 0 && key.second != id)) continue;
    f(s);
    s->changed.notify_all();
  }
  state.done.notify_all();
}

void hold(int device, int id) {
  if (id < 0) state.hold_new = true;
  if (device >= 0 && id >= 0) get_stream(device, id);  // nothing may have used it yet
  each_stream(device, id, [](Stream* s) {
    s->held = true;
    s->allowed = s->done;
  });
}
void release(int device, int id) {
  if (id < 0) state.hold_new = false;
  each_stream(device, id, [](Stream* s) { s->held = false; });
}
void step(int device, int id, int64_t tasks) {
  each_stream(device, id, [tasks](Stream* s) { s->allowed = s->done + tasks; });
}
void delays(uint64_t seed, int64_t least_us, int64_t most_us) {
  each_stream(-1, -1, [&](Stream* s) {
    if (most_us == 0 && !s->queue.empty()) s->queue.front().ready = {};
  });
  Lock lock(state.mutex);
  state.seed = seed;
  state.least_us = least_us;
  state.most_us = most_us;
}
void lazy(int64_t us) {
  {
    Lock lock(state.mutex);
    state.lazy_us = us;
  }
  each_stream(-1, -1, [](Stream*) {});
}

// A function of Python as a task. It may be let go only with the GIL.
int64_t enqueue(py::function function, int device, int id) {
  std::shared_ptr<py::function> kept(new py::function(std::move(function)), [](py::function* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  return push(get_stream(device, id), [kept] {
    py::gil_scoped_acquire gil;
    (*kept)();
  });
}

// Waits for all streams, and makes no context.
void drain() {
  std::vector<Stream*> streams;
  each_stream(-1, -1, [&](Stream* s) { streams.push_back(s); });
  for (auto* s : streams) synchronize(s);
}

py::dict stats() {
  Lock lock(state.mutex);
  py::dict counts;
  counts["launched"] = state.launched;
  counts["tasks"] = state.tasks;
  counts["streams"] = state.streams.size();
  counts["synchronous"] = state.synchronous;
  return counts;
}

c10::intrusive_ptr<c10d::Backend> backend(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, double timeout_s, bool blocking, bool reconfigurable) {
  return make_backend(
      std::move(store), rank, size, {std::chrono::milliseconds(int64_t(timeout_s * 1000)), blocking, reconfigurable});
}

}  // namespace
}  // namespace late

PYBIND11_MODULE(_late, m) {
  using namespace late;
  m.def("hold", hold);
  m.def("release", release);
  m.def("step", step);
  m.def("delays", delays);
  m.def("lazy", lazy);
  m.def("poison", [](bool on) { state.poison = on; });
  m.def("host_timeout_ms", [](int64_t ms) { state.host_timeout_ms = ms; });
  m.def("pending", [](int device, int id) {
    Stream* s = get_stream(device, id);
    Lock lock(state.mutex);
    return s->queued - s->done;
  });
  m.def("enqueue", enqueue);
  m.def("stats", stats);
  m.def("bad_fork", [] { return state.bad_fork; });
  m.def("initialized", [] { return state.initialized; });
  m.def("initialize", check_usable);
  m.def("drain", drain);
  m.def("contexts", [] {
    Lock lock(state.mutex);
    return state.made_by;
  });
  m.def("forget_contexts", [] {
    Lock lock(state.mutex);
    for (auto& made : state.contexts) made = false;
    state.made_by.clear();
  });
  m.def("exchange_capture_mode", [](int mode) { return std::exchange(capture_mode, mode); });
  m.def("begin_capture", [] {
    state.invalidated = false;
    state.capturing = true;
  });
  m.def("end_capture", [] {
    state.capturing = false;
    return !state.invalidated;
  });
  m.def("room_for_communicators", [](int device, int more, int abort_ms) {
    state.most_communicators[device] = more < 0 ? 0 : state.communicators[device] + more;
    state.abort_ms = abort_ms;
  });
  m.def("free_memory", [](int device) {
    int most = state.most_communicators[device];
    if (state.full[device]) return size_t(0);
    return most ? size_t(std::max(0, most - state.communicators[device])) * kCommunicatorBytes : own.bytes;
  });
  m.def("algorithms", [] {
    Lock lock(state.mutex);
    return std::exchange(state.algorithms, {});
  });
  m.def("fill", [](int device, bool full) { state.full[device] = full; });
  m.def("device_count", [] { return state.devices; });
  m.def("cpu_view", [](const Tensor& t) { return cpu_view(t); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("backend", backend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"), py::arg("blocking") = false,
        py::arg("reconfigurable") = false);
  m.def("share", [](const Tensor& t) { return std::make_pair(region_name(), share(t.storage())); });
  m.def("unshare", [](size_t place) { allocator.unshare(place); });
  m.def("import_bytes", import_bytes);
  m.def("register_words", register_words);
  m.def("write_value", [](int device, int id, uint64_t address, uint32_t value) { write_value(get_stream(device, id), address, value); });
  m.def("wait_value", [](int device, int id, uint64_t address, uint32_t value) { wait_value(get_stream(device, id), address, value); });
  py::class_<IpcEvent>(m, "IpcEvent")
      .def(py::init([] { return IpcEvent::make(); }))
      .def(py::init([](std::string region, int64_t place) { return IpcEvent{std::move(region), place}; }))
      .def_readonly("region", &IpcEvent::region)
      .def_readonly("place", &IpcEvent::place)
      .def("record", [](IpcEvent& event, int device, int id) { event.record(get_stream(device, id)); })
      .def("wait", [](IpcEvent& event, int device, int id) { event.wait(get_stream(device, id)); })
      .def("query", &IpcEvent::query);
}
