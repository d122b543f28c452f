// Which results an operator has, without running it: as PyTorch's meta kernels say. Many of those are written in Python
// and take 0.3 to 1 ms, and the GIL. So what was asked once is kept, and pointwise operators have a rule of their own.
#pragma once

#include "tensors.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace late {

using Stack = torch::jit::Stack;

// One call of an operator.
struct Call {
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op(op),
        schema(op.schema()),
        name(toString(schema.operator_name())),
        args(stack.end() - int64_t(schema.arguments().size()), stack.end()) {}

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const std::string name;
  Stack args;

  bool writes(const c10::Argument& a) const { return a.alias_info() && a.alias_info()->isWrite(); }
  bool is_out() const { return name.find("out") != std::string::npos; }
  // The argument that a result is, for results that are arguments.
  IValue written(size_t result) const {
    for (size_t i = 0; i < args.size(); i++) {
      auto& argument = schema.arguments()[i];
      if (writes(argument) && argument.alias_info()->beforeSets() == schema.returns()[result].alias_info()->beforeSets())
        return args[i];
    }
    TORCH_CHECK(false, "late: no argument for a result of ", name);
  }
};

class Shapes {
 public:
  // The results, as meta tensors; nothing where only the data tell, or where there is no meta kernel. May resize what
  // the call writes to: then `cpu` has the new views. It is what a task would be given.
  std::optional<Stack> of(const Call& call, Stack& cpu) {
    if (fills(call)) return std::nullopt;
    {
      Lock lock(mutex_);
      if (without_meta_.count(call.name)) return std::nullopt;
    }
    auto key = key_of(call);
    if (key) {
      Lock lock(mutex_);
      if (auto known = known_.find(*key); known != known_.end()) return known->second;
    }
    if (auto result = key ? pointwise(call, cpu) : std::nullopt) {
      keep(*key, *result);
      return result;
    }
    try {
      bool resized = false;
      auto result = by_meta_kernel(call, cpu, resized);
      if (result && key && !resized && !views(call)) keep(*key, *result);
      return result;
    } catch (const c10::NotImplementedError&) {
      Lock lock(mutex_);
      without_meta_.insert(call.name);
    } catch (const std::exception&) {
      // The data decide, or the user made a mistake: the run on the CPU, at once, tells which.
    }
    return std::nullopt;
  }

 private:
  // fill_, normal_ and the like: one tensor, which is the result. There is nothing to ask.
  static bool fills(const Call& call) {
    for (auto& r : call.schema.returns())
      if (!call.writes(r)) return false;
    int tensors = 0, written = 0;
    for (size_t i = 0; i < call.args.size(); i++)
      each_tensor(call.args[i], [&](const Tensor&) {
        tensors++;
        written += call.writes(call.schema.arguments()[i]);
      });
    return tensors == 1 && written == 1 && !call.is_out();
  }

  static bool views(const Call& call) {
    for (auto& r : call.schema.returns())
      if (r.alias_info() && !r.alias_info()->isWrite()) return true;
    return false;
  }

  // Whatever decides the results: all but floats, which change with each step of an optimizer, and decide nothing where
  // there are tensors.
  static std::optional<std::string> key_of(const Call& call) {
    std::string key = call.name;
    bool tensors = false;
    auto add = [&](char tag, int64_t value) {
      key.push_back(tag);
      key.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    for (size_t i = 0; i < call.args.size(); i++) {
      const auto& a = call.args[i];
      add('#', int64_t(i));
      if (a.isTensor() || a.isTensorList() || a.isOptionalTensorList()) {
        each_tensor(a, [&](const Tensor& t) {
          tensors = true;
          add('t', int64_t(t.scalar_type()) | (is_late(t) ? 256 : 0) | (is_wrapped_number(t) ? 512 : 0));
          for (auto size : t.sizes()) add('s', size);
          for (auto stride : t.strides()) add('r', stride);
        });
        if (a.isTensor()) add('u', a.toTensor().defined());
        if (a.isOptionalTensorList())
          for (std::optional<Tensor> t : a.toOptionalTensorList()) add('o', t && t->defined());
      } else if (a.isInt()) {
        add('i', a.toInt());
      } else if (a.isBool()) {
        add('b', a.toBool());
      } else if (a.isDouble()) {
        add('d', 0);
      } else if (a.isNone() || a.isGenerator() || a.isDevice()) {
        add('n', 0);
      } else if (a.isIntList()) {
        for (int64_t x : a.toIntVector()) add('l', x);
      } else if (a.isBoolList()) {
        for (bool x : a.toBoolList()) add('m', x);
      } else if (a.isString()) {
        key += a.toStringRef();
      } else {
        return std::nullopt;
      }
    }
    return tensors ? std::optional(key) : std::nullopt;
  }

  void keep(const std::string& key, const Stack& result) {
    Lock lock(mutex_);
    if (known_.size() > 50000) known_.clear();
    known_.emplace(key, result);
  }

  // The type from a run on CPU tensors of one element, the shape from TensorIterator.
  static std::optional<Stack> pointwise(const Call& call, const Stack& cpu) {
    if (call.schema.returns().size() != 1 || !call.op.hasTag(at::Tag::pointwise) || call.is_out()) return std::nullopt;
    try {
      Stack tiny;
      for (auto& value : cpu)
        tiny.push_back(map_tensors(value, [](const Tensor& t) {
          Tensor one = at::zeros(at::DimVector(t.dim(), 1), t.options());
          copy_flags(t, one);
          return one;
        }));
      call.op.callBoxed(tiny);
      auto* alias = call.schema.returns()[0].alias_info();
      if (tiny.size() != 1 || !tiny[0].isTensor() || (alias && !alias->isWrite())) return std::nullopt;
      at::TensorIteratorConfig config;
      config.set_check_mem_overlap(false).check_all_same_dtype(false);
      config.declare_static_dtype_and_device(tiny[0].toTensor().scalar_type(), c10::kMeta);
      config.add_owned_output(Tensor());
      for (auto& a : call.args) each_tensor(a, [&](const Tensor& t) { config.add_owned_const_input(meta_of(t)); });
      Tensor result = config.build().output();
      // In place: only where nothing is broadcast into the result.
      if (alias && !(call.args[0].isTensor() && call.args[0].toTensor().sizes() == result.sizes())) return std::nullopt;
      return Stack{result};
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  static std::optional<Stack> by_meta_kernel(const Call& call, Stack& cpu, bool& resized) {
    Stack meta;
    for (auto& a : call.args) {
      if (a.isDevice()) {
        meta.push_back(a.toDevice().type() == kDevice ? IValue(c10::Device(c10::kMeta)) : a);
      } else if (a.isGenerator()) {
        meta.push_back(IValue());
      } else {
        meta.push_back(map_tensors(a, [](const Tensor& t) { return is_late(t) || t.dim() > 0 ? meta_of(t) : t; }));
      }
    }
    const Stack given = meta;
    call.op.callBoxed(meta);
    for (auto& r : meta)
      if (!r.isTensor() && !r.isTensorList() && !r.isNone()) return std::nullopt;
    for (size_t i = 0; i < call.args.size(); i++) {
      if (!call.writes(call.schema.arguments()[i])) continue;
      bool this_one = false;
      each_pair(call.args[i], given[i], [&](const Tensor& t, const Tensor& m) {
        if (!is_late(t) || t.sizes() == m.sizes()) return;
        resize(t, m.sizes(), m.strides());
        this_one = true;
      });
      if (this_one) cpu[i] = map_tensors(call.args[i], [](const Tensor& t) { return is_late(t) ? cpu_view(t) : t; });
      resized |= this_one;
    }
    return meta;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, Stack> known_;
  std::set<std::string> without_meta_;
};
inline Shapes& shapes = *new Shapes;

}  // namespace late
