// Streams: a thread each, which runs what was queued as late as the schedule says.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace late {

using at::Tensor;
using c10::IValue;
using Clock = std::chrono::steady_clock;
using Lock = std::lock_guard<std::mutex>;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr int kMostDevices = 8;

// At the begin of the device's memory, which other processes may map: how far each stream is, and interprocess events.
constexpr size_t kStreams = 2048, kEvents = 4096, kHeaderBytes = 1 << 20;
struct Shared {
  std::atomic<int64_t> done[kStreams];    // by the stream's slot
  std::atomic<uint64_t> events[kEvents];  // the slot of a stream, and in the lower 48 bits the task that is waited for
  std::atomic<int64_t> next_event;
};
static_assert(sizeof(Shared) <= kHeaderBytes);
inline Shared* header = nullptr;  // of this process; set when its memory is made

struct Stream;

struct Task {
  std::function<void()> run;
  Stream* on = nullptr;  // a wait: until this stream has done `on_number`
  int64_t on_number = 0;
  int64_t number = 0;
  bool seen = false;
  Clock::time_point ready{};       // not before, by the delays
  Clock::time_point lazy_until{};  // not before unless somebody waits for it
};

// A task's number says its place in its stream. All is guarded by State::mutex.
struct Stream {
  int device, id, slot;
  std::deque<Task> queue;
  int64_t queued = 0, done = 0;
  int64_t demanded = 0;  // a host waits for tasks up to this one: laziness is over for them
  int64_t allowed = 0;   // while held: tasks up to this one may run
  bool held = false;
  std::condition_variable changed;
};

struct State {
  std::mutex mutex;
  std::condition_variable done;  // of any task
  std::map<std::pair<int, int>, Stream*> streams;
  std::map<int, int> next_id, next_high_id;  // by device
  int devices = 8;
  // Of this process, as the driver would have them: a device's primary context, and the call that made it.
  std::atomic<bool> contexts[kMostDevices] = {};
  std::atomic<bool> full[kMostDevices] = {};  // out of memory, because a test says so
  std::map<int, std::string> made_by;
  // Communicators that have memory of a device, how many of them it has room for (0: any number), and how long the abort
  // of one takes, which then frees its memory.
  std::atomic<int> communicators[kMostDevices] = {}, most_communicators[kMostDevices] = {};
  std::atomic<int> abort_ms = 0;
  std::vector<std::pair<std::string, std::string>> algorithms;  // that were connected by a launch, and the call
  bool initialized = false, bad_fork = false;
  std::string error;  // of a task: told at the next wait of a host

  // The schedule
  uint64_t seed = 0;
  int64_t least_us = 0, most_us = 0, lazy_us = 0;
  int64_t host_timeout_ms = 60000;
  bool hold_new = false, poison = true;
  std::atomic<bool> capturing = false, invalidated = false;  // a capture in global mode, by a thread that asks nothing

  // Counts for stats()
  int64_t launched = 0, tasks = 0;
  std::map<std::string, int64_t> synchronous;
};
inline State& state = *new State;  // never destroyed: the streams' threads outlive static destructors
inline thread_local Stream* running_on = nullptr;

inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A host waits for it: a lazy stream must run now. The mutex is held.
inline void demand(Stream* s, int64_t number) {
  if (s->demanded >= number) return;
  s->demanded = number;
  s->changed.notify_all();
  state.done.notify_all();
}

inline void run_stream(Stream* s) {
  running_on = s;
  at::set_num_threads(1);
  std::unique_lock<std::mutex> lock(state.mutex);
  for (;;) {
    if (s->queue.empty()) {
      s->changed.wait(lock);
      continue;
    }
    Task& next = s->queue.front();
    if (s->held && next.number > s->allowed) {
      s->changed.wait(lock);
      continue;
    }
    auto now = Clock::now();
    if (!next.seen) {
      next.seen = true;
      if (state.most_us > 0) {
        uint64_t drawn = mixed(mixed(state.seed * 1000003 + s->id) + next.number);
        uint64_t range = state.most_us - state.least_us + 1;
        next.ready = now + std::chrono::microseconds(state.least_us + int64_t(drawn % range));
      }
    }
    const bool demanded = next.number <= s->demanded;
    const bool lazy = state.lazy_us > 0 && !demanded && now < next.lazy_until;
    if (lazy || now < next.ready) {
      s->changed.wait_until(lock, lazy ? std::max(next.ready, next.lazy_until) : next.ready);
      continue;
    }
    if (next.on && next.on->done < next.on_number) {
      if (demanded) demand(next.on, next.on_number);
      state.done.wait(lock);
      continue;
    }
    Task task = std::move(next);
    s->queue.pop_front();
    lock.unlock();
    std::string error;
    try {
      if (task.run) task.run();
    } catch (const std::exception& e) {
      error = e.what();
    }
    task.run = nullptr;
    lock.lock();
    if (!error.empty() && state.error.empty()) state.error = error;
    s->done = task.number;
    header->done[s->slot] = task.number;
    state.tasks++;
    state.done.notify_all();
  }
}

void initialize();

inline void check_usable() {
  TORCH_CHECK(
      !state.bad_fork,
      "Cannot re-initialize late in forked subprocess. To use late with multiprocessing, you must use the 'spawn' start method");
  if (!state.initialized) initialize();
}

// The mutex is held.
inline Stream* make_stream(int device, int id) {
  auto*& s = state.streams[{device, id}];
  if (!s) {
    TORCH_CHECK(state.streams.size() <= kStreams, "late: more than ", kStreams, " streams");
    s = new Stream;
    s->device = device;
    s->id = id;
    s->slot = int(state.streams.size()) - 1;
    s->held = state.hold_new;
    std::thread(run_stream, s).detach();
  }
  return s;
}

inline Stream* get_stream(int device, int id) {
  check_usable();
  Lock lock(state.mutex);
  return make_stream(device, id);
}

inline int64_t last_queued(Stream* s) {
  Lock lock(state.mutex);
  return s->queued;
}

// Queues a task, or a wait for what another stream was given; what that has done already is not waited for.
inline int64_t push(Stream* s, std::function<void()> run, Stream* on = nullptr, int64_t on_number = 0) {
  Lock lock(state.mutex);
  if (on && (on == s || on->done >= on_number)) return s->queued;
  Task task;
  task.run = std::move(run);
  task.on = on;
  task.on_number = on_number;
  task.number = ++s->queued;
  task.lazy_until = Clock::now() + std::chrono::microseconds(state.lazy_us);
  s->queue.push_back(std::move(task));
  s->changed.notify_all();
  return s->queued;
}

// As CUDA: whoever waits next gets the error of a kernel. Here it is told once.
inline void raise_error() {
  std::string error;
  {
    Lock lock(state.mutex);
    error.swap(state.error);
  }
  TORCH_CHECK(error.empty(), "late: an earlier kernel failed asynchronously: ", error);
}

// The host waits, without the GIL. A wait that the schedule makes endless is an error, not a test that hangs.
inline void host_wait(Stream* s, int64_t number) {
  TORCH_CHECK(running_on != s, "late: a task may not wait for its own stream");
  std::optional<py::gil_scoped_release> without_gil;
  if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
  bool expired = false;
  {
    std::unique_lock<std::mutex> lock(state.mutex);
    demand(s, number);
    auto until = Clock::now() + std::chrono::milliseconds(state.host_timeout_ms);
    while (s->done < number && !expired)
      expired = state.done.wait_until(lock, until) == std::cv_status::timeout && s->done < number;
  }
  without_gil.reset();
  TORCH_CHECK(
      !expired, "late: host waited over ", state.host_timeout_ms, " ms for stream ", s->id, " (done ", s->done, " of ", number,
      s->held ? ", held)" : ")");
  raise_error();
}

inline void synchronize(Stream* s) {
  host_wait(s, last_queued(s));
}

}  // namespace late
