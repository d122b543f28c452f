// What the collective backend needs of the device. Both are one library, compiled as two units: late.cpp and backend.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>

namespace late {

// Queues a task, which runs later on the stream's own thread, without the GIL.
void push_on(const c10::Stream& stream, std::function<void()> task);
// A CPU tensor over the same memory, for tasks only. It keeps nothing alive, as a launched kernel does not.
at::Tensor cpu_view(const at::Tensor& t);

// The memory of a communicator on a device; null if a test has filled the device, or made it too small.
std::shared_ptr<void> communicator_memory(const c10::Device& device);
// How long an abort takes.
std::chrono::milliseconds abort_time();
// A launch that connects with the peers for this algorithm, while the host waits.
void connects(const char* algorithm);

struct BackendSettings {
  std::chrono::milliseconds timeout{600'000};
  // Whether connecting returns only when it is done; else the first operation waits for that.
  bool blocking = false;
  // The second form: it revokes instead of aborting, and is given peers by reconfigure().
  bool reconfigurable = false;
};
c10::intrusive_ptr<c10d::Backend> make_backend(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, const BackendSettings& settings);

}  // namespace late
