// What the kernels of the collectives compute, on CPU tensors over the device's memory. Sums are taken in the order of
// the ranks, so that all ranks get the same bits.
#pragma once

#include "wire.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace late {

using at::Tensor;
using Tensors = std::vector<Tensor>;

inline Part part(int peer, const Tensor& t) {
  return {peer, t.data_ptr(), t.nbytes()};
}

inline Tensor& reduce_into(Tensor& sum, const Tensor& next, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::PREMUL_SUM:
      return sum.scalar_type() == at::kBool ? sum.logical_or_(next) : sum.add_(next);
    case c10d::ReduceOp::PRODUCT:
      return sum.mul_(next);
    case c10d::ReduceOp::MIN:
      return at::minimum_out(sum, sum, next);
    case c10d::ReduceOp::MAX:
      return at::maximum_out(sum, sum, next);
    default:
      TORCH_CHECK(false, "late: unreachable");
  }
}

// The operand of this rank: NCCL multiplies before it adds, also for the average of floats, by a factor of their type.
inline Tensor operand(const Tensor& t, const c10d::ReduceOp& op, int size) {
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    auto* factor = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    return factor->tensor_factor.defined() ? t.mul(factor->tensor_factor.item()) : t.mul(factor->double_factor);
  }
  return op.op_ == c10d::ReduceOp::AVG && t.is_floating_point() ? t.mul(at::full({}, 1.0 / size, t.options())) : t;
}

inline void reduce_all(const Tensors& of_rank, const c10d::ReduceOp& op, Tensor result) {
  Tensor sum = of_rank[0].clone();
  for (size_t i = 1; i < of_rank.size(); i++) reduce_into(sum, of_rank[i], op.op_);
  if (op.op_ == c10d::ReduceOp::AVG && !sum.is_floating_point()) sum.div_(int64_t(of_rank.size()), "trunc");
  result.copy_(sum);
}

inline void allreduce(Communicator& c, Tensor t, const c10d::ReduceOp& op) {
  Tensor own = operand(t, op, c.size).contiguous();
  Tensors of_rank;
  std::vector<Part> out, in;
  for (int r = 0; r < c.size; r++) {
    of_rank.push_back(r == c.rank ? own : at::empty_like(own));
    if (r == c.rank) continue;
    out.push_back(part(r, own));
    in.push_back(part(r, of_rank[r]));
  }
  c.exchange(out, in);
  reduce_all(of_rank, op, t);
}

inline void reduce(Communicator& c, Tensor in, Tensor result, const c10d::ReduceOp& op, int root) {
  Tensor own = operand(in, op, c.size).contiguous();
  if (c.rank != root) return c.exchange({part(root, own)}, {});
  Tensors of_rank;
  std::vector<Part> parts;
  for (int r = 0; r < c.size; r++) {
    of_rank.push_back(r == root ? own : at::empty_like(own));
    if (r != root) parts.push_back(part(r, of_rank[r]));
  }
  c.exchange({}, parts);
  reduce_all(of_rank, op, result);
}

inline void broadcast(Communicator& c, Tensor t, int root) {
  if (c.rank != root) return c.exchange({}, {part(root, t)});
  std::vector<Part> out;
  for (int r = 0; r < c.size; r++)
    if (r != root) out.push_back(part(r, t));
  c.exchange(out, {});
}

// outs[r] is what rank r sends here; ins[r] what it is sent. Undefined: nothing.
inline void alltoall(Communicator& c, const Tensors& outs, const Tensors& ins) {
  std::vector<Part> send, receive;
  for (int r = 0; r < c.size; r++) {
    if (r == c.rank) continue;
    if (ins[r].defined()) send.push_back(part(r, ins[r]));
    if (outs[r].defined()) receive.push_back(part(r, outs[r]));
  }
  if (outs[c.rank].defined()) outs[c.rank].copy_(ins[c.rank].view_as(outs[c.rank]));
  c.exchange(send, receive);
}

inline void allgather(Communicator& c, const Tensors& outs, const Tensor& in) {
  alltoall(c, outs, Tensors(c.size, in));
}

inline void reduce_scatter(Communicator& c, Tensor out, const Tensors& ins, const c10d::ReduceOp& op) {
  Tensors mine, of_rank;
  for (auto& t : ins) mine.push_back(operand(t, op, c.size).contiguous());
  for (int r = 0; r < c.size; r++) of_rank.push_back(at::empty_like(mine[c.rank]));
  alltoall(c, of_rank, mine);
  reduce_all(of_rank, op, out.view(of_rank[0].sizes()));
}

// Equal pieces of a flat tensor, one for each rank.
inline Tensors pieces(const Tensor& t, int size) {
  return t.view({-1}).chunk(size);
}

inline Tensors split(const Tensor& t, const std::vector<int64_t>& sizes, int size) {
  if (sizes.empty()) return t.view({size, -1}).unbind();
  return t.split_with_sizes(sizes);
}

}  // namespace late
