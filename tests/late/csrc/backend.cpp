// The backend "late" of torch.distributed, with the rules of PyTorch's NCCL backends.
#include "collectives.h"
#include "late.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <Python.h>

#include <iostream>
#include <list>

namespace late {
namespace {

using c10d::OpType;
using c10d::Work;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Future = c10::ivalue::Future;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kLook = milliseconds(100);     // how often the watchdog looks
constexpr size_t kTreeBytes = 64 << 10;         // allreduces of up to this size take NCCL's tree, larger ones its ring
constexpr auto kPoll = milliseconds(1);       // of a host that waits with a timeout

enum class Handling { None = 0, TearDown = 1, CleanUpOnly = 2, SkipCleanUp = 3 };

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(kDevice).getStream(device);
}

// Of the process, as PyTorch's "should dump": an error of any legacy group makes the monitor of the first one, mostly the
// user's world, write what is known, wait for the heartbeat's timeout, and end the process.
std::atomic<bool> should_dump{false};
std::atomic<int> legacy_groups{0};

// Waits of the host let other threads of Python run.
struct NoGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~NoGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// What the caller's work and the watchdog both know of an operation. Each finds out for itself whether it failed.
struct Launched {
  Launched(OpType kind, c10::Device device, std::shared_ptr<Communicator> communicator)
      : kind(kind), device(device), communicator(std::move(communicator)) {}

  const OpType kind;
  const c10::Device device;
  const std::shared_ptr<Communicator> communicator;
  c10::Event end{kDevice};
  Clock::time_point began = Clock::now();
  milliseconds timeout;
  uint64_t number;
  std::mutex mutex;
  Tensors kept;  // until the caller's stream waits for the end, or the operation has ended
  c10::intrusive_ptr<Future> outcome;

  void forget_tensors() {
    Tensors none;
    std::lock_guard<std::mutex> g(mutex);
    none.swap(kept);
  }
  std::string text() const {
    return "WorkLate(" + c10d::opTypeToString(kind) + ", number " + std::to_string(number) + ", timeout " +
        std::to_string(timeout.count()) + " ms)";
  }
  std::exception_ptr communicator_error() const {
    auto error = communicator->error();
    if (error.empty()) return nullptr;
    return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, text() + ": late communicator error: " + error));
  }
  std::exception_ptr timeout_error(milliseconds limit) const {
    return std::make_exception_ptr(
        C10_BUILD_ERROR(DistBackendError, text() + " timed out: it ran for more than " + std::to_string(limit.count()) + " ms"));
  }
  bool expired(milliseconds limit) const { return Clock::now() - began >= limit; }
};

class WorkLate final : public Work {
 public:
  WorkLate(int rank, std::shared_ptr<Launched> launched, Tensors outputs);

  bool isCompleted() override {
    ask();
    return exception() || launched_->end.query();
  }
  bool isSuccess() const override { C10_THROW_ERROR(NotImplementedError, "WorkLate::isSuccess() is deprecated, as NCCL's"); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<Future> getFuture() override { return future; }
  c10::intrusive_ptr<Future> getFutureResult() override { return launched_->outcome; }
  uint64_t getSequencenumber() const override { return launched_->number; }
  milliseconds getTimeout() const override { return launched_->timeout; }
  void synchronize() override {
    launched_->end.block(current_stream(launched_->device));
    launched_->forget_tensors();
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(milliseconds timeout) override;
  void abort() override { launched_->communicator->abort(); }

  c10::intrusive_ptr<Future> future;
  bool barrier = false;

 private:
  // Sets the exception if the communicator has one; after an abort nobody can ask it any more.
  void ask() {
    if (launched_->communicator->aborted()) return;
    if (auto error = launched_->communicator_error()) set(error);
  }
  void set(std::exception_ptr error) {
    std::lock_guard<std::mutex> g(mutex_);
    if (!exception_) exception_ = error;
  }

  std::shared_ptr<Launched> launched_;
  Tensors outputs_;
};

class LateBackend final : public c10d::Backend {
 public:
  LateBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const BackendSettings& settings)
      : Backend(rank, size),
        store_(std::move(store)),
        settings_(settings),
        handling_(Handling(setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", int(Handling::SkipCleanUp)))),
        connect_timeout_(std::chrono::seconds(setting("TORCH_NCCL_NONBLOCKING_TIMEOUT", 30 * 60))) {
    watchdog_ = std::thread([this] { watch(); });
    if (!settings.reconfigurable && legacy_groups++ == 0 && setting("TORCH_NCCL_DUMP_ON_TIMEOUT", 1))
      monitor_ = std::thread([this, kills = setting("TORCH_NCCL_ENABLE_MONITORING", 1) != 0] { monitor(kills); });
  }

  ~LateBackend() override {
    NoGil released;
    stop_watchdog();
    communicator_.reset();
    watched_.clear();
    if (memory_) std::this_thread::sleep_for(abort_time());
  }

  const std::string getBackendName() const override { return settings_.reconfigurable ? "late2" : "late"; }
  void setTimeout(milliseconds timeout) override { settings_.timeout = timeout; }
  uint64_t getSequenceNumberForGroup() override { return number_; }
  c10d::ErrorType getError() override { return error_; }
  bool isInitialized() override { return communicator_ && communicator_->connected(); }

  void eagerConnectSingleDevice(at::Device device) override {
    NoGil released;
    std::lock_guard<std::mutex> lock(mutex_);
    connect(device);
    if (settings_.blocking) wait_connected();
  }

  // Takes the lock that whoever connects holds: an abort begins when that is over.
  void abort() override {
    NoGil released;
    std::lock_guard<std::mutex> lock(mutex_);
    abort_locked();
  }
  void shutdown() override {
    abort();
    NoGil released;
    stop_watchdog();
  }

  // Operations

  using Ptr = c10::intrusive_ptr<Work>;

  Ptr allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
    Tensor t = single(ts);
    check(o.reduceOp);
    return launch(OpType::ALLREDUCE, {t}, {t}, o, [op = o.reduceOp, v = view(t)](Communicator& c) { late::allreduce(c, v, op); });
  }
  Ptr allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override {
    check(o.reduceOp);
    return launch(OpType::COALESCED, ts, ts, o, [op = o.reduceOp, vs = views(ts)](Communicator& c) {
      for (auto& v : vs) late::allreduce(c, v, op);
    });
  }
  Ptr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    Tensor t = single(ts);
    return launch(OpType::BROADCAST, {t}, {t}, o, [root = int(o.rootRank), v = view(t)](Communicator& c) { late::broadcast(c, v, root); });
  }
  Ptr reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    Tensor t = single(ts);
    check(o.reduceOp);
    return launch(OpType::REDUCE, {t}, {t}, o, [op = o.reduceOp, root = int(o.rootRank), v = view(t)](Communicator& c) {
      late::reduce(c, v, v, op, root);
    });
  }
  Ptr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    Tensor in = single(ins);
    TORCH_CHECK(outs.size() == 1 && int(outs[0].size()) == getSize(), "late: allgather needs an output for each rank");
    return launch(OpType::ALLGATHER, {in}, outs[0], o, [vs = views(outs[0]), v = view(in)](Communicator& c) { late::allgather(c, vs, v); });
  }
  Ptr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    Tensors outs{out}, ins{in};
    return gathered(OpType::_ALLGATHER_BASE, outs, ins, o);
  }
  Ptr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return gathered(OpType::COALESCED, outs, ins, o);
  }
  Ptr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    Tensor out = single(outs);
    check(o.reduceOp);
    TORCH_CHECK(ins.size() == 1 && int(ins[0].size()) == getSize(), "late: reduce_scatter needs an input for each rank");
    return launch(OpType::REDUCE_SCATTER, ins[0], {out}, o, [op = o.reduceOp, v = view(out), vs = views(ins[0])](Communicator& c) {
      late::reduce_scatter(c, v, vs, op);
    });
  }
  Ptr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Tensors outs{out}, ins{in};
    return scattered(OpType::_REDUCE_SCATTER_BASE, outs, ins, o);
  }
  Ptr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    return scattered(OpType::COALESCED, outs, ins, o);
  }
  Ptr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    auto outs = late::split(view(out), out_sizes, getSize()), ins = late::split(view(in), in_sizes, getSize());
    return launch(OpType::ALLTOALL_BASE, {in}, {out}, o, [outs, ins](Communicator& c) { late::alltoall(c, outs, ins); });
  }
  Ptr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(int(outs.size()) == getSize() && int(ins.size()) == getSize(), "late: alltoall needs a tensor for each rank");
    return launch(OpType::ALLTOALL, ins, outs, o, [vo = views(outs), vi = views(ins)](Communicator& c) { late::alltoall(c, vo, vi); });
  }
  Ptr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    Tensor in = single(ins);
    int root = o.rootRank;
    bool mine = root == getRank();
    Tensors to(getSize()), from(getSize()), written;
    from[root] = view(in);
    if (mine) {
      TORCH_CHECK(outs.size() == 1 && int(outs[0].size()) == getSize(), "late: gather needs an output for each rank at its root");
      to = views(written = outs[0]);
    }
    return launch(OpType::GATHER, {in}, written, o, [to, from](Communicator& c) { late::alltoall(c, to, from); });
  }
  Ptr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    Tensor out = single(outs);
    int root = o.rootRank;
    Tensors to(getSize()), from(getSize()), read;
    to[root] = view(out);
    if (root == getRank()) {
      TORCH_CHECK(ins.size() == 1 && int(ins[0].size()) == getSize(), "late: scatter needs an input for each rank at its root");
      from = views(read = ins[0]);
    }
    return launch(OpType::SCATTER, read, {out}, o, [to, from](Communicator& c) { late::alltoall(c, to, from); });
  }
  Ptr send(Tensors& ts, int to, int /*tag*/) override {
    Tensor t = single(ts);
    // A send ends when it has been received: that is when it is answered.
    return launch(OpType::SEND, {t}, {}, Options{}, [v = view(t), to](Communicator& c) {
      char taken = 0;
      c.exchange({part(to, v)}, {});
      c.exchange({}, {{to, &taken, 1}});
    });
  }
  Ptr recv(Tensors& ts, int from, int /*tag*/) override {
    Tensor t = single(ts);
    return launch(OpType::RECV, {t}, {t}, Options{}, [v = view(t), from](Communicator& c) {
      char taken = 1;
      c.exchange({}, {part(from, v)});
      c.exchange({{from, &taken, 1}}, {});
    });
  }
  Ptr barrier(const c10d::BarrierOptions& o) override {
    auto index = o.device_ids.empty() ? c10::impl::VirtualGuardImpl(kDevice).getDevice().index() : o.device_ids.front();
    c10::OptionalDeviceGuard guard(c10::Device(kDevice, index));
    Tensor t = at::zeros({1}, at::TensorOptions().device(kDevice));
    auto work = launch(OpType::ALLREDUCE, {t}, {t}, o, [v = view(t)](Communicator& c) { late::allreduce(c, v, c10d::ReduceOp::SUM); });
    if (work) {
      static_cast<WorkLate*>(work.get())->barrier = true;
    } else {
      current_stream(t.device()).synchronize();
    }
    return work;
  }

  // Reconfiguration: the second form only

  bool supportsReconfigure() const override { return settings_.reconfigurable; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  Ptr reconfigure(const c10d::ReconfigureOptions& o) override;

  void handle_failure(const std::string& why) {
    if (settings_.reconfigurable) {
      std::lock_guard<std::mutex> lock(mutex_);
      abort_locked();
    } else if (handling_ == Handling::CleanUpOnly || handling_ == Handling::TearDown) {
      abort();
    }
    if (!settings_.reconfigurable && (handling_ == Handling::TearDown || handling_ == Handling::SkipCleanUp)) {
      std::cerr << "[late rank " << getRank() << "] the watchdog takes the process down, as operations after this one may "
                << "run on incomplete data: " << why << std::endl;
      std::abort();
    }
  }

 private:
  struct Options {
    milliseconds timeout = c10d::kUnsetTimeout;
    bool asyncOp = true;
  };

  static Tensor single(const Tensors& ts) {
    TORCH_CHECK(ts.size() == 1, "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread.");
    return ts[0];
  }
  static void check(const c10d::ReduceOp& op) {
    TORCH_CHECK(
        op.op_ <= c10d::ReduceOp::MAX || op.op_ == c10d::ReduceOp::PREMUL_SUM,
        "Cannot use ReduceOp.BAND, BOR, BXOR or UNUSED with late, as with NCCL");
  }
  static Tensor view(const Tensor& t) {
    TORCH_CHECK(!t.is_sparse(), "Tensors must be dense");
    TORCH_CHECK(t.device().type() == kDevice, "No backend type associated with device type ", t.device().type());
    TORCH_CHECK(t.is_contiguous(t.suggest_memory_format()), "Tensors must be contiguous");
    Tensor v = cpu_view(t.is_complex() ? at::view_as_real(t) : t);
    return v.is_contiguous() ? v : v.as_strided({v.numel()}, {1});
  }
  static Tensors views(const Tensors& ts) {
    Tensors vs;
    for (auto& t : ts) vs.push_back(view(t));
    return vs;
  }

  template <class O>
  Ptr gathered(OpType kind, Tensors& outs, Tensors& ins, const O& o) {
    std::vector<Tensors> parts;
    for (size_t i = 0; i < outs.size(); i++) {
      TORCH_CHECK(outs[i].numel() == ins[i].numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
      TORCH_CHECK(outs[i].scalar_type() == ins[i].scalar_type(), "output tensor must have the same type as input tensor");
      parts.push_back(pieces(view(outs[i]), getSize()));
    }
    return launch(kind, ins, outs, o, [parts, vs = views(ins)](Communicator& c) {
      for (size_t i = 0; i < vs.size(); i++) late::allgather(c, parts[i], vs[i]);
    });
  }
  template <class O>
  Ptr scattered(OpType kind, Tensors& outs, Tensors& ins, const O& o) {
    check(o.reduceOp);
    std::vector<Tensors> parts;
    for (size_t i = 0; i < outs.size(); i++) {
      TORCH_CHECK(ins[i].numel() == outs[i].numel() * getSize(), "input tensor must be the same size as output size times world size");
      TORCH_CHECK(outs[i].scalar_type() == ins[i].scalar_type(), "input tensor must be the same type as the output tensor.");
      parts.push_back(pieces(view(ins[i]), getSize()));
    }
    return launch(kind, ins, outs, o, [op = o.reduceOp, parts, vs = views(outs)](Communicator& c) {
      for (size_t i = 0; i < vs.size(); i++) late::reduce_scatter(c, vs[i], parts[i], op);
    });
  }

  template <class O, class F>
  Ptr launch(OpType kind, const Tensors& ins, const Tensors& outs, const O& o, F kernel) {
    auto device = (outs.empty() ? ins : outs).at(0).device();
    for (auto* list : {&ins, &outs})
      for (auto& t : *list) TORCH_CHECK(t.device() == device, "late: tensors of one operation on ", device, " and ", t.device());
    auto communicator = ready(device);
    if (kind == OpType::ALLREDUCE && getSize() > 1 && outs[0].numel() > 0) {
      const char* algorithm = outs[0].nbytes() <= kTreeBytes ? "tree" : "ring";
      if (communicator->uses_first(algorithm)) connects(algorithm);
    }
    auto current = current_stream(device);
    auto stream = o.asyncOp ? *stream_ : current;
    if (o.asyncOp) {
      c10::Event before(kDevice);
      before.record(current);
      before.block(stream);
    }
    auto launched = std::make_shared<Launched>(kind, device, communicator);
    launched->timeout = o.timeout == c10d::kUnsetTimeout ? settings_.timeout : o.timeout;
    launched->number = ++number_;
    launched->outcome = c10::make_intrusive<Future>(c10::IntType::get());
    if (o.asyncOp) {
      launched->kept = ins;
      launched->kept.insert(launched->kept.end(), outs.begin(), outs.end());
    }
    push_on(stream, [communicator, kernel, kind, written = views(outs), ticket = communicator->ticket()] {
      at::AutoDispatchBelowADInplaceOrView below;
      communicator->run(ticket, kind, written, [&] { kernel(*communicator); });
    });
    launched->end.record(stream);
    c10::intrusive_ptr<WorkLate> work;
    if (o.asyncOp) {
      work = c10::make_intrusive<WorkLate>(getRank(), launched, outs);
      work->future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
      // Done at once: whoever uses the value on a stream of his own gets it in order, and nobody is told of an error.
      c10::StreamGuard on(stream);
      work->future->markCompleted(c10::IValue(outs));
    }
    {
      std::lock_guard<std::mutex> lock(watched_mutex_);
      watched_.push_back(launched);
    }
    return work;
  }

  // The communicator of the only device; waits for its connections. Under the lock, as abort().
  std::shared_ptr<Communicator> ready(c10::Device device) {
    NoGil released;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!communicator_) {
      TORCH_CHECK(!settings_.reconfigurable, "late2: reconfigure() first");
      connect(device);
    }
    TORCH_CHECK(*device_ == device, "late: this group is on ", *device_, ", not on ", device);
    if (communicator_->aborted())
      C10_THROW_ERROR(
          DistBackendError,
          c10::str("late communicator was ", settings_.reconfigurable ? "revoked" : "aborted", " on rank ", getRank(), "."));
    wait_connected();
    return communicator_;
  }

  // A communicator needs some, and reports its lack as NCCL does.
  void take_memory(c10::Device device) {
    memory_.reset();
    memory_ = communicator_memory(device);
    if (!memory_) C10_THROW_ERROR(DistBackendError, "late error, unhandled device error: failure 'out of memory'");
  }

  void connect(c10::Device device) {
    if (communicator_) return;
    device_ = device;
    take_memory(device);
    c10::impl::VirtualGuardImpl guard(kDevice);
    stream_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    int port = 0;
    if (getRank() == 0) {
      port = listener_->port;
      auto text = std::to_string(port);
      if (getSize() > 1) store_->set("late/root", std::vector<uint8_t>(text.begin(), text.end()));
    } else {
      auto told = store_->get("late/root");  // as NCCL's id: the host waits for it, as long as the store does
      port = std::stoi(std::string(told.begin(), told.end()));
    }
    communicator_ = std::make_shared<Communicator>(getRank(), getSize());
    communicator_->connect(port, listener_);
  }

  void wait_connected() {
    wait_connected(connect_timeout_);
  }
  void wait_connected(milliseconds timeout) {
    auto until = Clock::now() + timeout;
    while (!communicator_->connected()) {
      auto error = communicator_->error();
      if (!error.empty()) C10_THROW_ERROR(DistBackendError, "late communicator error " + error);
      if (Clock::now() > until) C10_THROW_ERROR(DistBackendError, "late: connecting timed out");
      std::this_thread::sleep_for(kPoll);
    }
  }

  void abort_locked() {
    if (communicator_) communicator_->abort();
    if (!memory_ || settings_.reconfigurable) return;  // revoked: the memory is freed with the group
    std::this_thread::sleep_for(abort_time());
    memory_.reset();
  }

  // The watchdog

  void watch() {
    std::unique_lock<std::mutex> lock(watched_mutex_);
    while (!stopping_) {
      stop_.wait_for(lock, kLook, [&] { return stopping_; });
      if (!watched_.empty()) c10::impl::VirtualGuardImpl(kDevice).setDevice(watched_.front()->device);
      if (handling_ == Handling::None) continue;
      for (auto it = watched_.begin(); it != watched_.end() && !stopping_;) {
        auto launched = *it;
        lock.unlock();
        std::exception_ptr error = launched->communicator->aborted() ? nullptr : launched->communicator_error();
        auto kind = c10d::ErrorType::COMM_ERROR;
        if (!error && !launched->end.query() && launched->expired(launched->timeout)) {
          error = launched->timeout_error(launched->timeout);
          kind = c10d::ErrorType::TIMEOUT;
        }
        if (error) {
          if (error_ == c10d::ErrorType::SUCCESS) error_ = kind;
          if (!settings_.reconfigurable) should_dump = true;
          if (!launched->outcome->completed())
            launched->outcome->markCompleted(int(kind == c10d::ErrorType::TIMEOUT ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR));
          std::string why;
          try {
            std::rethrow_exception(error);
          } catch (const std::exception& e) {
            why = e.what();
          }
          handle_failure(why);
        }
        bool ended = launched->end.query();
        if (ended) {
          launched->forget_tensors();
          if (!launched->outcome->completed()) launched->outcome->markCompleted(int(c10d::WorkResult::SUCCESS));
        }
        lock.lock();
        it = ended || error ? watched_.erase(it) : std::next(it);
      }
    }
  }
  void monitor(bool kills) {
    const auto heartbeat = std::chrono::seconds(setting("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 8 * 60));
    std::unique_lock<std::mutex> lock(watched_mutex_);
    while (!stop_.wait_for(lock, kLook, [&] { return stopping_; }))
      if (should_dump) {
        if (stop_.wait_for(lock, heartbeat, [&] { return stopping_; })) return;
        if (!kills) return;
        std::cerr << "[late rank " << getRank() << "] the monitor ends the process, due to a collective timeout or exception" << std::endl;
        std::abort();
      }
  }
  void stop_watchdog() {
    {
      std::lock_guard<std::mutex> lock(watched_mutex_);
      stopping_ = true;
    }
    stop_.notify_all();
    if (watchdog_.joinable()) watchdog_.join();
    if (monitor_.joinable()) monitor_.join();
  }

  c10::intrusive_ptr<c10d::Store> store_;
  BackendSettings settings_;
  const Handling handling_;
  const milliseconds connect_timeout_;
  std::mutex mutex_;  // who connects, launches or aborts
  std::optional<c10::Device> device_;
  std::optional<c10::Stream> stream_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<void> memory_;
  const std::shared_ptr<Listener> listener_ = std::make_shared<Listener>();
  std::atomic<uint64_t> number_{0};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::thread watchdog_, monitor_;
  std::mutex watched_mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::list<std::shared_ptr<Launched>> watched_;
  int64_t generation_ = -1;
  const uint64_t instance_ = c10::detail::getNonDeterministicRandom();
};

WorkLate::WorkLate(int rank, std::shared_ptr<Launched> launched, Tensors outputs)
    : Work(rank, launched->kind), launched_(std::move(launched)), outputs_(std::move(outputs)) {}

bool WorkLate::wait(milliseconds timeout) {
  synchronize();
  NoGil released;
  if (timeout != kNoTimeout) {
    while (!isCompleted()) {
      if (launched_->expired(timeout)) {
        set(launched_->timeout_error(timeout));
        break;
      }
      std::this_thread::sleep_for(kPoll);
    }
  } else if (barrier && !isCompleted()) {
    current_stream(launched_->device).synchronize();
  }
  if (auto error = exception()) {
    launched_->communicator->abort();
    std::rethrow_exception(error);
  }
  return true;
}

// What tells members of one generation from each other: rank and generation may be the same, the instance is not.
c10d::ReconfigureHandle LateBackend::get_reconfigure_handle() const {
  TORCH_CHECK(settings_.reconfigurable, "Backend late does not support get_reconfigure_handle");
  return c10::str("late2:", rank_, ":", generation_, ":", instance_);
}

c10::intrusive_ptr<Work> LateBackend::reconfigure(const c10d::ReconfigureOptions& o) {
  TORCH_CHECK(settings_.reconfigurable, "Backend late does not support reconfigure");
  auto* handles = std::get_if<std::vector<c10d::ReconfigureHandle>>(&o.handles);
  TORCH_CHECK(handles && !handles->empty(), "late2: reconfigure needs a list of handles");
  NoGil released;
  std::lock_guard<std::mutex> lock(mutex_);
  auto own = std::find(handles->begin(), handles->end(), get_reconfigure_handle());
  TORCH_CHECK(own != handles->end(), "late2: the own handle is not among those given");
  TORCH_CHECK(o.uuid != generation_, "late2: uuid ", o.uuid, " was used before");
  abort_locked();
  rank_ = own - handles->begin();
  size_ = handles->size();
  generation_ = o.uuid;
  error_ = c10d::ErrorType::SUCCESS;
  c10::impl::VirtualGuardImpl guard(kDevice);
  device_ = guard.getDevice();
  take_memory(*device_);
  stream_ = guard.getStreamFromGlobalPool(*device_, /*isHighPriority=*/true);
  // As NCCL's id of a communicator, which rank 0 makes now.
  auto store = c10::make_intrusive<c10d::PrefixStore>(c10::str("late2/", o.uuid), store_);
  auto key = "root/" + handles->front(), port = std::to_string(listener_->port);
  if (rank_ == 0) {
    auto claimed = store->compareSet("claimed", std::vector<uint8_t>{}, std::vector<uint8_t>(port.begin(), port.end()));
    TORCH_CHECK(std::string(claimed.begin(), claimed.end()) == port, "late2: uuid ", o.uuid, " was used before");
    store->set(key, claimed);
  } else {
    store->wait({key}, o.timeout.value_or(settings_.timeout));
    auto told = store->get(key);
    port = std::string(told.begin(), told.end());
  }
  communicator_ = std::make_shared<Communicator>(rank_, size_, generation_);
  communicator_->connect(std::stoi(port), listener_);
  wait_connected(o.timeout.value_or(settings_.timeout));
  auto done = c10::make_intrusive<Future>(c10::NoneType::get());
  done->markCompleted();
  return Work::create_from_future(done);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, const BackendSettings& settings) {
  return c10::make_intrusive<LateBackend>(std::move(store), rank, size, settings);
}

}  // namespace late
