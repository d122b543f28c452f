// The one kernel that nearly all operators have: results are made now, and the CPU's kernel runs later, on CPU tensors
// over the device's memory.
#pragma once

#include "shapes.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace late {

// What the task is given. Tensors of the CPU are copied now: the caller may change them later.
inline Stack arguments_for_task(const Call& call) {
  // Indices may be on the CPU.
  const bool indexes = call.name.find("index") != std::string::npos;
  Stack cpu;
  for (size_t i = 0; i < call.args.size(); i++) {
    const auto& a = call.args[i];
    const auto& argument = call.schema.arguments()[i];
    if (a.isDevice()) {
      cpu.push_back(a.toDevice().type() == kDevice ? IValue(c10::Device(c10::kCPU)) : a);
    } else if (a.isGenerator() || (a.isNone() && argument.type()->str().find("Generator") != std::string::npos)) {
      cpu.push_back(for_launch(a.isNone() ? std::nullopt : std::optional<at::Generator>(a.toGenerator())));
    } else {
      cpu.push_back(map_tensors(a, [&](const Tensor& t) {
        if (is_late(t)) return cpu_view(t);
        TORCH_CHECK(
            t.dim() == 0 || indexes, "Expected all tensors to be on the same device, but found at least two devices, late and ",
            t.device(), "! (", call.name, ")");
        Tensor copy = t.clone();
        copy_flags(t, copy);
        return copy;
      }));
    }
  }
  return cpu;
}

inline void check_dense(const Call& call, const IValue& results) {
  each_tensor(results, [&](const Tensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        t.layout() == at::kStrided, "late: the operator ", call.name, " is missing: its result is ", t.layout());
  });
}

// The results of an operator whose task is queued; `into` are where it copies what the CPU's kernel returns.
inline Stack make_results(const Call& call, const Stack& meta, Stack& into) {
  Stack results;
  for (size_t i = 0; i < call.schema.returns().size(); i++) {
    if (call.schema.returns()[i].alias_info()) {
      results.push_back(call.written(i));
      into.push_back(IValue());
      continue;
    }
    check_dense(call, meta[i]);
    results.push_back(map_tensors(meta[i], [](const Tensor& m) { return empty_on_device(m.sizes(), m.strides(), m.scalar_type()); }));
    into.push_back(map_tensors(results.back(), [](const Tensor& t) { return cpu_view(t); }));
  }
  return results;
}

// The shape depends on the data (nonzero, unique, equal): the host waits, as with CUDA, and the kernel runs now.
inline Stack run_now(const Call& call, Stream* stream, Stack cpu) {
  {
    Lock lock(state.mutex);
    state.synchronous[call.name]++;
  }
  synchronize(stream);
  call.op.callBoxed(cpu);
  Stack results;
  for (size_t i = 0; i < call.schema.returns().size(); i++) {
    if (call.writes(call.schema.returns()[i])) {
      results.push_back(call.written(i));
      each_pair(results.back(), cpu[i], [&](const Tensor& to, const Tensor& result) {
        if (to.sizes() != result.sizes()) resize(to, result.sizes(), result.strides());
        push(stream, [view = cpu_view(to), result] {
          if (view.data_ptr() != result.data_ptr()) view.copy_(result);
        });
      });
      continue;
    }
    check_dense(call, cpu[i]);
    results.push_back(map_tensors(cpu[i], [&](const Tensor& result) {
      Tensor t = empty_on_device(result.sizes(), result.strides(), result.scalar_type());
      push(stream, [view = cpu_view(t), result] { view.copy_(result); });
      return t;
    }));
  }
  return results;
}

inline Stack results_of(const Call& call) {
  Stream* stream = current();
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "late: the operator ", call.name, " is missing");
  Stack cpu = arguments_for_task(call);
  auto meta = shapes.of(call, cpu);

  bool is_view = false, makes_tensors = false;
  for (auto& r : call.schema.returns()) {
    makes_tensors |= !r.alias_info();
    is_view |= r.alias_info() && !r.alias_info()->isWrite();
  }
  if (is_view) {
    TORCH_CHECK_NOT_IMPLEMENTED(meta, "late: the operator ", call.name, " is missing: a view without a meta kernel");
    Stack results;
    for (auto& r : *meta)
      results.push_back(map_tensors(r, [&](const Tensor& m) {
        return view_of(call.args[0].toTensor(), m.sizes(), m.strides(), m.storage_offset(), m.dtype());
      }));
    return results;
  }
  // What only writes to its arguments needs no shapes.
  if (!meta && (makes_tensors || call.is_out())) return run_now(call, stream, std::move(cpu));

  Stack into;
  Stack results = make_results(call, meta.value_or(Stack()), into);
  {
    Lock lock(state.mutex);
    state.launched++;
  }
  push(stream, [op = call.op, cpu = std::move(cpu), into = std::move(into)]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(cpu);
    for (size_t i = 0; i < into.size(); i++)
      if (!into[i].isNone()) each_pair(into[i], cpu[i], [](const Tensor& to, const Tensor& result) { to.copy_(result); });
  });
  return results;
}

inline void launch(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard not_functional(c10::DispatchKey::Functionalize);
  c10::OptionalDeviceGuard device;
  for (auto& a : call.args)
    each_tensor(a, [&](const Tensor& t) {
      if (is_late(t) && !device.current_device()) device.reset_device(t.device());
    });
  Stack results = results_of(call);
  torch::jit::drop(*stack, call.args.size());
  for (auto& r : results) stack->push_back(std::move(r));
}

inline void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  launch(op, stack);
}

}  // namespace late
