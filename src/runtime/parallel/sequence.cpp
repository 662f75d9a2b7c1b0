// Tensors are packed and unpacked by differentiable operators around one all-to-all (zero/tp.h), whose backward is the
// reverse all-to-all.
#include <zero/errors.h>
#include <zero/sp.h>
#include <zero/tp.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "sharding/tensor_cut.h"

namespace zero {
namespace {

using sharding::Range;
using Ranges = std::vector<Range>;  // by rank

// n elements over `ranks` ranks.
Ranges divided(std::int64_t n, int ranks) {
  Ranges result;
  for (int i = 0; i < ranks; ++i) result.push_back(sharding::cut_range(n, 1, i, ranks));
  return result;
}

[[noreturn]] void fail(const std::string& text) { throw ConfigError("[sequence parallelism] " + text); }

void require_four_dimensions(const at::Tensor& x) {
  if (x.dim() != 4) fail(base::join("got a tensor of shape ", x.sizes(), ", expected [batch, tokens, heads, width]"));
}

void require_tokens(std::int64_t tokens) {
  if (tokens < 0)
    fail(base::join(
        "got ", tokens,
        " tokens, expected 0 or more. Hint: the tokens of the whole sequence, or 0 if all ranks have equally "
        "many."));
}

// The tokens of each rank.
Ranges stretches(const at::Tensor& x, const Mesh& mesh, std::int64_t tokens) {
  require_tokens(tokens);
  const int ranks = mesh.size("sp");
  auto result = divided(tokens == 0 ? x.size(1) * ranks : tokens, ranks);
  const auto& own = result[static_cast<std::size_t>(mesh.rank("sp"))];
  if (own.numel() != x.size(1))
    fail(base::join("got ", x.size(1), " tokens on sp ", mesh.rank("sp"), ", expected ", own.numel(), " of ", tokens,
                    ": mesh.tokens(", tokens, ") is ", own.begin, " to ", own.end));
  return result;
}

Ranges heads_of(std::int64_t heads, int ranks) {
  if (heads < ranks)
    fail(base::join("got ", heads, " heads for ", ranks, " sequence-parallel ranks, expected at least ", ranks,
                    ". Hint: ", ranks, " heads or more",
                    heads > 1    ? base::join(", or sequence_parallel_size ", heads, " or less.")
                    : heads == 1 ? ", or sequence_parallel_size 1."
                                 : "."));
  return divided(heads, ranks);
}

// Of n, those next to `wanted`, which is none.
std::string nearest_divisors(std::int64_t n, std::int64_t wanted) {
  auto below = std::min(wanted, n), above = std::max<std::int64_t>(wanted, 1);
  while (below > 0 && n % below != 0) --below;
  while (above < n && n % above != 0) ++above;
  if (below < 1) return std::to_string(above);
  return above >= n && wanted > n ? std::to_string(below) : base::join(below, " or ", above);
}

// The heads of keys or values that each rank needs for its query heads.
Ranges heads_of_groups(const Ranges& queries, std::int64_t query_heads, std::int64_t heads) {
  if (heads < 1 || query_heads % heads != 0)
    fail(base::join("got ", heads, " heads of keys and values for ", query_heads,
                    " query heads, expected a divisor. Hint: ", nearest_divisors(query_heads, heads), "."));
  const auto group = query_heads / heads;
  Ranges result;
  for (const auto& range : queries) result.push_back({range.begin / group, (range.end + group - 1) / group});
  return result;
}

// x by ranges along dim 2. Ranges that follow one another are one operator, whose backward is one copy.
std::vector<at::Tensor> parts_of(const at::Tensor& x, const Ranges& ranges) {
  std::vector<std::int64_t> lengths;
  std::int64_t next = 0;
  bool consecutive = true;
  for (const auto& range : ranges) {
    consecutive &= range.begin == next;
    next = range.end;
    lengths.push_back(range.numel());
  }
  if (consecutive && next == x.size(2)) return x.split_with_sizes(lengths, 2);
  std::vector<at::Tensor> parts;
  for (const auto& range : ranges) parts.push_back(x.narrow(2, range.begin, range.numel()));
  return parts;
}

// Each rank gets all tokens of its heads. heads: of every tensor, by rank.
std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& tensors, const std::vector<Ranges>& heads,
                                 const Ranges& tokens, const Mesh& mesh) {
  mesh.note_sequence_exchange();
  const int ranks = mesh.size("sp"), own = mesh.rank("sp");
  std::vector<std::vector<at::Tensor>> parts;  // by tensor and rank
  for (std::size_t i = 0; i < tensors.size(); ++i) parts.push_back(parts_of(tensors[i], heads[i]));
  std::vector<at::Tensor> sent;
  std::vector<std::int64_t> in_numels, out_numels, pieces;
  for (int p = 0; p < ranks; ++p) {
    const auto at = static_cast<std::size_t>(p);
    std::int64_t in = 0, out = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& x = tensors[i];
      sent.push_back(parts[i][at].reshape({-1}));
      in += sent.back().numel();
      pieces.push_back(x.size(0) * tokens[at].numel() * heads[i][static_cast<std::size_t>(own)].numel() * x.size(3));
      out += pieces.back();
    }
    in_numels.push_back(in);
    out_numels.push_back(out);
  }
  const auto received = tp::all_to_all(at::cat(sent), mesh.group("sp"), out_numels, in_numels).split_with_sizes(pieces);
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& x = tensors[i];
    std::vector<at::Tensor> stretches;
    for (std::size_t p = 0; p < tokens.size(); ++p)
      stretches.push_back(received[p * tensors.size() + i].view(
          {x.size(0), tokens[p].numel(), heads[i][static_cast<std::size_t>(own)].numel(), x.size(3)}));
    result.push_back(at::cat(stretches, 1));
  }
  return result;
}

// Keys or values with one head for each query head of this rank, unless all its groups have equally many.
at::Tensor repeated(const at::Tensor& x, const Range& queries, const Range& heads, std::int64_t group) {
  if (queries.numel() == heads.numel()) return x;
  const bool uniform = heads.numel() == 1 || (queries.begin % group == 0 && queries.end % group == 0);
  if (uniform) return x;
  std::vector<std::int64_t> index;
  for (auto q = queries.begin; q < queries.end; ++q) index.push_back(q / group - heads.begin);
  return x.index_select(2, at::tensor(index, at::TensorOptions().dtype(at::kLong).device(x.device())));
}

}  // namespace

at::Tensor sequence_to_heads(const at::Tensor& x, const Mesh& mesh, std::int64_t tokens) {
  require_four_dimensions(x);
  if (mesh.size("sp") == 1) return x;
  return to_heads({x}, {heads_of(x.size(2), mesh.size("sp"))}, stretches(x, mesh, tokens), mesh).front();
}

std::array<at::Tensor, 3> sequence_to_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                            const Mesh& mesh, std::int64_t tokens) {
  for (const auto* x : {&q, &k, &v}) {
    require_four_dimensions(*x);
    if (x->size(0) != q.size(0) || x->size(1) != q.size(1))
      fail(base::join("got q of shape ", q.sizes(), " and k or v of shape ", x->sizes(),
                      ", expected the same batch and tokens"));
  }
  if (mesh.size("sp") == 1) return {q, k, v};
  const auto queries = heads_of(q.size(2), mesh.size("sp"));
  const auto keys = heads_of_groups(queries, q.size(2), k.size(2)),
             values = heads_of_groups(queries, q.size(2), v.size(2));
  const auto all = to_heads({q, k, v}, {queries, keys, values}, stretches(q, mesh, tokens), mesh);
  const auto own = static_cast<std::size_t>(mesh.rank("sp"));
  return {all[0], repeated(all[1], queries[own], keys[own], q.size(2) / k.size(2)),
          repeated(all[2], queries[own], values[own], q.size(2) / v.size(2))};
}

at::Tensor heads_to_sequence(const at::Tensor& x, const Mesh& mesh, std::int64_t tokens, std::int64_t heads) {
  require_four_dimensions(x);
  const int ranks = mesh.size("sp");
  if (ranks == 1) return x;
  require_tokens(tokens);
  const auto own = static_cast<std::size_t>(mesh.rank("sp"));
  const auto of_heads = heads_of(heads == 0 ? x.size(2) * ranks : heads, ranks);
  const auto of_tokens = divided(tokens == 0 ? x.size(1) : tokens, ranks);
  if (of_tokens.back().end != x.size(1) || of_heads[own].numel() != x.size(2))
    fail(base::join("got a tensor of shape ", x.sizes(), " on sp ", own, ", expected ", of_tokens.back().end,
                    " tokens and ", of_heads[own].numel(), " heads"));
  std::vector<std::int64_t> lengths, in_numels, out_numels;
  for (std::size_t p = 0; p < of_tokens.size(); ++p) {
    lengths.push_back(of_tokens[p].numel());
    in_numels.push_back(x.size(0) * lengths.back() * x.size(2) * x.size(3));
    out_numels.push_back(x.size(0) * of_tokens[own].numel() * of_heads[p].numel() * x.size(3));
  }
  std::vector<at::Tensor> sent;
  for (const auto& part : x.split_with_sizes(lengths, 1)) sent.push_back(part.reshape({-1}));
  const auto received =
      tp::all_to_all(at::cat(sent), mesh.group("sp"), out_numels, in_numels).split_with_sizes(out_numels);
  std::vector<at::Tensor> parts;
  for (std::size_t p = 0; p < received.size(); ++p)
    parts.push_back(received[p].view({x.size(0), of_tokens[own].numel(), of_heads[p].numel(), x.size(3)}));
  return at::cat(parts, 2);
}

}  // namespace zero
