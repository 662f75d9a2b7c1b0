// Each function is a movement of data in forward and its counterpart in backward.
#include <zero/errors.h>
#include <zero/tp.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "sharding/tensor_cut.h"

namespace zero::tp {
namespace {

enum class Move : std::uint8_t {
  Same,        // x
  Sum,         // all-reduce
  Own,         // this rank's part
  All,         // all-gather of parts
  SumThenOwn,  // reduce-scatter
};

// How the whole is divided along one dimension.
struct Division {
  Group group;
  std::int64_t dim = 0;
  Lengths lengths;

  std::int64_t begin(int rank) const {
    return std::accumulate(lengths.begin(), lengths.begin() + rank, std::int64_t{0});
  }
  bool even() const {
    return std::all_of(lengths.begin(), lengths.end(), [&](auto length) { return length == lengths.front(); });
  }
  at::Tensor part(const at::Tensor& whole, int rank) const {
    return whole.narrow(dim, begin(rank), lengths[static_cast<std::size_t>(rank)]);
  }
};

at::Tensor sum(const at::Tensor& x, Communicator& group) {
  auto total = x.detach().clone(at::MemoryFormat::Contiguous);
  if (total.numel() > 0) group.all_reduce(total.view({-1}))->wait();
  return total;
}

at::Tensor all_parts(const at::Tensor& x, const Division& division) {
  auto& group = *division.group;
  const auto own = x.detach().contiguous().view({-1});
  auto sizes = x.sizes().vec();
  auto& length = sizes[static_cast<std::size_t>(division.dim)];
  std::vector<std::vector<std::int64_t>> sizes_of;
  std::vector<std::int64_t> numels;
  for (const auto part : division.lengths) {
    length = part;
    sizes_of.push_back(sizes);
    numels.push_back(c10::multiply_integers(sizes));
  }
  auto flat = at::empty({std::accumulate(numels.begin(), numels.end(), std::int64_t{0})}, x.options());
  if (division.even()) {
    if (flat.numel() > 0) group.all_gather(flat, own)->wait();
  } else {
    const auto sent = own.repeat({group.size()});
    group.all_to_all(flat, sent, numels, std::vector<std::int64_t>(numels.size(), own.numel()))->wait();
  }
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (std::size_t j = 0; j < numels.size(); begin += numels[j++])
    parts.push_back(flat.narrow(0, begin, numels[j]).view(sizes_of[j]));
  return at::cat(parts, division.dim);
}

at::Tensor summed_part(const at::Tensor& x, const Division& division) {
  auto& group = *division.group;
  std::vector<at::Tensor> parts;
  std::vector<std::int64_t> numels;
  for (int j = 0; j < group.size(); ++j) {
    parts.push_back(division.part(x.detach(), j).reshape({-1}));
    numels.push_back(parts.back().numel());
  }
  const auto sent = at::cat(parts);
  const auto own = static_cast<std::size_t>(group.rank());
  const auto sizes = division.part(x, group.rank()).sizes().vec();
  if (division.even()) {
    auto mine = at::empty({numels[own]}, x.options());
    if (mine.numel() > 0) group.reduce_scatter(mine, sent)->wait();
    return mine.view(sizes);
  }
  auto received = at::empty({group.size() * numels[own]}, x.options());
  group.all_to_all(received, sent, std::vector<std::int64_t>(numels.size(), numels[own]), numels)->wait();
  const auto terms = received.view({group.size(), numels[own]});
  auto total = terms[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  for (int j = 1; j < group.size(); ++j) total += terms[j];
  return total.to(x.scalar_type()).view(sizes);
}

at::Tensor moved(Move move, const at::Tensor& x, const Division& division) {
  switch (move) {
    case Move::Sum:
      return sum(x, *division.group);
    case Move::Own:
      return division.part(x, division.group->rank()).contiguous();
    case Move::All:
      return all_parts(x, division);
    case Move::SumThenOwn:
      return summed_part(x, division);
    case Move::Same:
      break;
  }
  return x.view_as(x);
}

// What backward needs, as an IValue.
struct Saved final : torch::CustomClassHolder {
  Saved(Move move, Division division) : move(move), division(std::move(division)) {}
  const Move move;
  const Division division;
};

void require_once_differentiable() {
  if (at::GradMode::is_enabled())
    throw ConfigError("[zero::tp] got a backward pass with create_graph; these functions are differentiable once");
}

struct Function final : torch::autograd::Function<Function> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, Move forward,
                            c10::intrusive_ptr<Saved> saved) {
    auto y = moved(forward, x, saved->division);
    context->saved_data["saved"] = at::IValue::make_capsule(std::move(saved));
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    require_once_differentiable();
    const auto holder = context->saved_data["saved"].toCapsule();
    const auto& saved = static_cast<const Saved&>(*holder);
    return {moved(saved.move, gradients[0], saved.division), at::Tensor(), at::Tensor()};
  }
};

// What an all-to-all sends and receives, as an IValue.
struct Exchange final : torch::CustomClassHolder {
  Exchange(Group group, std::vector<std::int64_t> out, std::vector<std::int64_t> in)
      : group(std::move(group)), out(std::move(out)), in(std::move(in)) {}
  const Group group;
  const std::vector<std::int64_t> out, in;
};

struct AllToAll final : torch::autograd::Function<AllToAll> {
  static at::Tensor moved(const at::Tensor& x, const Exchange& exchange, bool back) {
    const auto& out = back ? exchange.in : exchange.out;
    const auto& in = back ? exchange.out : exchange.in;
    auto received = at::empty({std::accumulate(out.begin(), out.end(), std::int64_t{0})}, x.options());
    exchange.group->all_to_all(received, x.detach().contiguous(), out, in)->wait();
    return received;
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            c10::intrusive_ptr<Exchange> exchange) {
    auto y = moved(x, *exchange, /*back=*/false);
    context->saved_data["exchange"] = at::IValue::make_capsule(std::move(exchange));
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    require_once_differentiable();
    const auto holder = context->saved_data["exchange"].toCapsule();
    return {moved(gradients[0], static_cast<const Exchange&>(*holder), /*back=*/true), at::Tensor()};
  }
};

at::Tensor apply(const at::Tensor& x, Move forward, Move backward, Division division) {
  if (at::GradMode::is_enabled() && x.requires_grad())
    return Function::apply(x, forward, c10::make_intrusive<Saved>(backward, std::move(division)));
  return forward == Move::Same ? x : moved(forward, x, division);
}

// whole: x is the whole, not a part.
Division divide(const char* call, const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths,
                bool whole) {
  const auto fail = [&](const std::string& text) { throw ConfigError(base::join("[tp::", call, "] ", text)); };
  Division division{group, dim < 0 ? dim + x.dim() : dim, lengths};
  if (division.dim < 0 || division.dim >= x.dim())
    fail(base::join("got dim ", dim, " for a tensor of shape ", x.sizes()));
  const auto length = x.size(division.dim);
  const int ranks = group->size();
  if (lengths.empty()) {
    // Parts may be uneven, so the whole's length follows from a part's only if it is given or parts are even.
    const auto n = whole ? length : length * ranks;
    for (int j = 0; j < ranks; ++j) division.lengths.push_back(sharding::cut_range(n, 1, j, ranks).numel());
  }
  if (static_cast<int>(division.lengths.size()) != ranks)
    fail(base::join("got ", lengths.size(), " lengths, expected one for each of ", ranks, " ranks"));
  const auto expected = whole ? division.begin(ranks) : division.lengths[static_cast<std::size_t>(group->rank())];
  if (length != expected)
    fail(
        base::join("got a tensor of shape ", x.sizes(), ", expected ", expected, " elements along dim ", division.dim));
  return division;
}

}  // namespace

at::Tensor copy(const at::Tensor& x, const Group& group) {
  return group->size() == 1 ? x : apply(x, Move::Same, Move::Sum, {group, 0, {}});
}

at::Tensor reduce(const at::Tensor& x, const Group& group) {
  return group->size() == 1 ? x : apply(x, Move::Sum, Move::Same, {group, 0, {}});
}

at::Tensor scatter(const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths) {
  if (group->size() == 1) return x;
  return apply(x, Move::Own, Move::All, divide("scatter", x, group, dim, lengths, /*whole=*/true));
}

at::Tensor gather(const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths) {
  if (group->size() == 1) return x;
  return apply(x, Move::All, Move::Own, divide("gather", x, group, dim, lengths, /*whole=*/false));
}

at::Tensor gather_split(const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths) {
  if (group->size() == 1) return x;
  return apply(x, Move::All, Move::SumThenOwn, divide("gather_split", x, group, dim, lengths, /*whole=*/false));
}

at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths) {
  if (group->size() == 1) return x;
  return apply(x, Move::SumThenOwn, Move::All, divide("reduce_scatter", x, group, dim, lengths, /*whole=*/true));
}

at::Tensor all_to_all(const at::Tensor& in, const Group& group, const std::vector<std::int64_t>& out_numels,
                      const std::vector<std::int64_t>& in_numels) {
  if (group->size() == 1) return in;
  return AllToAll::apply(in, c10::make_intrusive<Exchange>(group, out_numels, in_numels));
}

}  // namespace zero::tp
